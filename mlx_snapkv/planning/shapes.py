"""Computes, without a model's weights, how much memory each layer needs to read a chunk."""

import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, RotatingKVCache
from mlx_lm.utils import load_config, load_model

from ..caches.layers import all_caches
from ..entries.quota import UNLIMITED
from ..errors import UnsupportedModelError
from ..models import cache_owners
from ..models.counts import experts_per_token, n_query_heads
from ..models.family import AttentionFamily
from ..models.rope_parameters import unread_parameters
from .scores import MIN_TOKENS_AT_ONCE, is_fused, tokens_at_once


@dataclass(frozen=True)
class LayerShape:
    """The memory that a decoder layer needs to read a chunk, not counting its cache."""

    token_bytes: int  # bytes per token of the chunk, for the outputs of the layer's projections
    pair_bytes: int = 0  # bytes of attention scores per (query, entry) pair; 0 with a fused kernel
    window: int = 0  # maximum number of entries that a query can see
    # Bytes per visible entry for the keys and values that all heads expand from an MLA latent, or 0 without MLA.
    entry_bytes: int = 0

    def chunk_bytes(
        self,
        chunk_size: int,
        n_visible: int,
        max_score_bytes: int | None = None,
        margin: float = 1,
    ) -> int:
        """Return the bytes that the layer needs to read a chunk.

        Args:
            chunk_size: chunk length in tokens.
            n_visible: number of entries that the chunk's last token can see, including the chunk's entries.
            max_score_bytes: size limit for the scores. Chunks with larger scores are read in pieces. None for no limit.
            margin: safety factor for everything except the scores, whose size is known exactly.
        """
        if self.window != UNLIMITED:
            n_visible = min(n_visible, self.window + chunk_size - 1)
        chunk_score_bytes = self.pair_bytes * chunk_size * n_visible
        n_at_once = chunk_size
        if max_score_bytes is not None and self.pair_bytes:
            smallest_piece_bytes = self.pair_bytes * MIN_TOKENS_AT_ONCE * n_visible
            chunk_score_bytes = min(chunk_score_bytes, max(max_score_bytes, smallest_piece_bytes))
            # Pieces get shorter as the prompt grows, so the first piece has the most activations.
            n_at_once = min(chunk_size, tokens_at_once(0, self.pair_bytes, max_score_bytes))
        activation_bytes = self.entry_bytes * n_visible + self.token_bytes * n_at_once
        return chunk_score_bytes + int(margin * activation_bytes)


def layer_shapes(model: Any, caches: list) -> set[LayerShape]:
    """Return the distinct shapes of a model's layers, given `caches` with one token.

    The last layer is left out, because its attention is not computed during prefill.
    """
    layers = list(model.layers)
    windows_by_layer = [_max_visible(cache) for cache in caches]
    key_sizes_by_layer = [_key_size(cache) for cache in caches]
    if len(caches) != len(layers):
        # Some layers have several caches or none, so caches can't be matched to layers. Assume the largest window and
        # key size for all layers.
        windows_by_layer = [max(windows_by_layer)] * len(layers)
        key_sizes_by_layer = [max(key_sizes_by_layer)] * len(layers)
    float32_bytes = 4
    bytes_per_number = min(
        (cache.keys.dtype.size for cache in _caches_with_keys(caches)), default=float32_bytes
    )
    family_by_module_id = _family_by_module_id(model)
    shapes = {LayerShape(0)}  # never empty, even with a single layer
    for layer, window, key_size in zip(layers[:-1], windows_by_layer, key_sizes_by_layer):
        modules = layer.modules()
        shape = LayerShape(bytes_per_number * _n_projected_numbers(modules))
        attentions_of_layer = [module for module in modules if id(module) in family_by_module_id]
        if window and attentions_of_layer:
            attention = max(attentions_of_layer, key=n_query_heads)
            family = family_by_module_id[id(attention)]
            shape = _with_attention(shape, attention, family, window, key_size, bytes_per_number)
        shapes.add(shape)
    return shapes


def window_of(cache: Any) -> int | None:
    """Return the size of a cache's sliding or chunked window, or None if it has no window."""
    if isinstance(cache, RotatingKVCache):
        return cache.max_size
    return cache.chunk_size if isinstance(cache, ChunkedKVCache) else None


def _max_visible(cache: Any) -> int:
    """Return how many entries a layer's queries can see at most, or 0 if the layer has no keys."""
    caches = _caches_with_keys([cache])
    return (window_of(caches[0]) or UNLIMITED) if caches else 0


def _key_size(cache: Any) -> int:
    """Return the head size of a layer's keys, or 0 if the layer has no keys."""
    caches = _caches_with_keys([cache])
    return caches[0].keys.shape[-1] if caches else 0


def _caches_with_keys(caches: list) -> list[Any]:
    """Return the caches that contain keys, including members of cache lists."""
    return [
        cache
        for cache in all_caches(caches)
        if not isinstance(cache, ArraysCache) and not cache.empty()
    ]


def _family_by_module_id(model: Any) -> dict[int, AttentionFamily | None]:
    """Map the `id()` of each attention module to its family, or to None if the family is unknown."""
    try:
        owners = cache_owners(model)
    except UnsupportedModelError:
        return {id(module): None for module in model.modules() if n_query_heads(module)}
    return {
        id(module): owner.family
        for owner in owners
        for module in (owner.attention, *owner.borrowers)
    }


def _with_attention(
    shape: LayerShape,
    attention: Any,
    family: AttentionFamily | None,
    window: int,
    key_size: int,
    bytes_per_number: int,
) -> LayerShape:
    """Return a copy of a layer's shape with `pair_bytes`, `window` and `entry_bytes` set for its attention.

    Args:
        shape: the layer's shape, with only `token_bytes` set.
        attention: the attention module.
        family: the module's family, or None if it is unknown.
        window: maximum number of entries that a query can see.
        key_size: head size of the keys in the layer's cache.
        bytes_per_number: size of a number in bytes, such as 2 for float16.
    """
    head_size = key_size
    entry_bytes = 0
    if hasattr(attention, "embed_q"):  # MLA expands the latents for every head
        head_size = attention.qk_nope_head_dim
        n_expanded = n_query_heads(attention) * (head_size + attention.v_head_dim)
        entry_bytes = bytes_per_number * n_expanded
    pair_bytes = score_bytes(attention, family, head_size, bytes_per_number)
    return replace(shape, pair_bytes=pair_bytes, window=window, entry_bytes=entry_bytes)


def score_bytes(
    attention: Any, family: AttentionFamily | None, head_size: int, bytes_per_number: int
) -> int:
    """Return the score bytes per (query, entry) pair for all heads, with `bytes_per_number` bytes per score.

    A fused kernel stores no scores. Most MLA modules compute separate scores from the positional parts of queries and
    keys, and store these even with a fused kernel. Some families join the positional parts to the other parts, so they
    have no separate scores.
    """
    is_mla = hasattr(attention, "embed_q")
    joins_positional_part = family is not None and family.query_factor is not None
    has_positional_scores = is_mla and not joins_positional_part
    has_sinks = not is_mla and family is not None and family.sinks_of(attention) is not None
    # Number of score arrays that are in memory at the same time.
    n_positional = 1 if has_positional_scores else 0
    if is_fused(head_size):
        n_others = 0
    elif has_sinks:
        n_others = 3  # the scores, a copy with a column for the sinks, and a copy without it
    else:
        n_others = 1
    return bytes_per_number * n_query_heads(attention) * (n_positional + n_others)


def _n_projected_numbers(modules: list[Any]) -> int:
    """Return how many numbers a layer's projections compute per token."""
    n_experts = max(1, *map(experts_per_token, modules))
    n_numbers = 0
    for module in modules:
        class_name = type(module).__name__
        weight = module.get("weight")
        if weight is None or weight.ndim < 2 or "Embedding" in class_name:
            continue
        # Weights are (outputs, inputs). In mlx-lm's Switch classes, an axis of experts comes first. Convolutions
        # compute one number per channel, and the first axis of their weights is the channels.
        n_outputs = weight.shape[0] if "Conv" in class_name else weight.shape[-2]
        n_numbers += n_outputs * (n_experts if "Switch" in class_name else 1)
    return n_numbers


def without_weights(folder: str | Path) -> nn.Module:
    """Load the model in a folder, with placeholder weights of the right shapes."""
    config_changes = unread_parameters(load_config(Path(folder))).changes
    model, _ = load_model(Path(folder), lazy=True, model_config=config_changes)
    model.update(tree_map(_placeholder, model.parameters()))
    return model


def _placeholder(weight: mx.array) -> mx.array:
    """Return zeros with the shape and dtype of `weight`. They take almost no memory."""
    return mx.broadcast_to(mx.zeros((), weight.dtype), weight.shape)


def repository_without_weights(name: str) -> nn.Module:
    """Load a model from Hugging Face with placeholder weights. Only the config and the weights' headers are fetched."""
    from huggingface_hub import get_safetensors_metadata, hf_hub_download

    config = Path(hf_hub_download(name, "config.json"))
    headers = get_safetensors_metadata(name).files_metadata
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_bytes(config.read_bytes())
        for file, header in headers.items():
            tensors = {name: vars(tensor) for name, tensor in header.tensors.items()}
            _write_header_only(Path(folder) / Path(file).name, tensors)
        return without_weights(folder)


def _write_header_only(path: Path, tensors: dict[str, dict[str, Any]]) -> None:
    """Write a safetensors file with a header for `tensors`.

    In place of the data, it has a hole, which takes no disk space.
    """
    header = json.dumps(tensors).encode()
    # `data_offsets` is the tensor's [start, end] in the data.
    end = max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)
