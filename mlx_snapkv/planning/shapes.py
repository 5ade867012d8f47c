"""Shapes of a model's layers, and the memory that each takes to read a chunk. The weights are not needed."""

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

from ..caches.layers import members
from ..entries.quota import UNLIMITED
from ..errors import UnsupportedModelError
from ..models import attentions
from ..models.counts import experts_per_token, query_heads
from ..models.family import AttentionFamily
from ..models.rope_parameters import unread_parameters
from .scores import MIN_TOKENS_AT_ONCE, is_fused, tokens_at_once

METAL = mx.metal.is_available()


@dataclass(frozen=True)
class LayerShape:
    """The memory that a decoder layer takes to read a chunk, not counting its cache."""

    per_token: int  # bytes per token in the chunk: outputs of the layer's projections
    scores: int = 0  # bytes per query and visible entry; 0 with a fused kernel
    window: int = 0  # maximum number of entries that a query can see
    per_entry: int = 0  # bytes per visible entry: MLA latents expanded for every head

    def chunk_bytes(
        self, chunk: int, seen: int, limit: int | None = None, margin: float = 1
    ) -> int:
        """Return the bytes that the layer takes to read a chunk.

        Args:
            chunk: chunk length in tokens.
            seen: number of entries that the chunk's last token can see, including the chunk's own.
            limit: size limit for the scores in bytes. Larger chunks are read in pieces.
            margin: safety factor for everything except the scores, which are computed exactly.
        """
        if self.window != UNLIMITED:
            seen = min(seen, self.window + chunk - 1)
        scores = self.scores * chunk * seen
        n_at_once = chunk
        if limit is not None and self.scores:
            smallest_piece = self.scores * MIN_TOKENS_AT_ONCE * seen
            scores = min(scores, max(limit, smallest_piece))
            # Pieces get shorter as the prompt grows, so the first piece has the most activations.
            n_at_once = min(chunk, tokens_at_once(0, self.scores, limit))
        return scores + int(margin * (self.per_entry * seen + self.per_token * n_at_once))


def layer_shapes(model: Any, caches: list) -> set[LayerShape]:
    """Return the distinct shapes of a model's layers, given `caches` with one token.

    The last layer is left out, because its attention is not computed during prefill.
    """
    layers = list(model.layers)
    windows = [_window(cache) for cache in caches]
    key_sizes = [_key_size(cache) for cache in caches]
    if len(caches) != len(layers):
        # Some layers have several caches, or none of their own. Treat every layer like the largest.
        windows = [max(windows)] * len(layers)
        key_sizes = [max(key_sizes)] * len(layers)
    item = min((c.keys.dtype.size for c in _holding(caches)), default=4)  # bytes per number
    families = _families(model)
    shapes = {LayerShape(0)}
    for layer, window, key_size in zip(layers[:-1], windows, key_sizes):
        modules = layer.modules()
        shape = LayerShape(item * _projected(modules))
        readers = [x for x in modules if id(x) in families] if window else []
        if readers:
            attention = max(readers, key=query_heads)
            shape = _attending(shape, attention, families[id(attention)], window, key_size, item)
        shapes.add(shape)
    return shapes


def window_of(cache: Any) -> int | None:
    """Return the size of a cache's sliding or chunked window, or None if it has no window."""
    if isinstance(cache, RotatingKVCache):
        return cache.max_size
    return cache.chunk_size if isinstance(cache, ChunkedKVCache) else None


def _window(cache: Any) -> int:
    """Return the maximum number of entries that a layer's queries can see, or 0 without attention."""
    holding = _holding([cache])
    if not holding:
        return 0
    return window_of(holding[0]) or UNLIMITED


def _key_size(cache: Any) -> int:
    """Return the size of a layer's keys, or 0 without attention."""
    holding = _holding([cache])
    return holding[0].keys.shape[-1] if holding else 0


def _holding(caches: Any) -> list[Any]:
    """Return the caches that contain keys, including members of cache lists."""
    return [c for c in members(caches) if not isinstance(c, ArraysCache) and not c.empty()]


def _families(model: Any) -> dict[int, AttentionFamily | None]:
    """Map the `id()` of each attention module to its family, or to None if the family is unknown."""
    try:
        owners = attentions(model)
    except UnsupportedModelError:
        return {id(module): None for module in model.modules() if query_heads(module)}
    return {
        id(module): owner.family
        for owner in owners
        for module in (owner.attention, *owner.borrowers)
    }


def _attending(
    shape: LayerShape,
    attention: Any,
    family: AttentionFamily | None,
    window: int,
    key_size: int,
    item: int,
) -> LayerShape:
    """Add attention to the shape of a layer.

    Args:
        shape: the layer's shape without attention.
        attention: the attention module.
        family: the module's family, or None if it is unknown.
        window: maximum number of entries that a query can see.
        key_size: size of the keys in the layer's cache.
        item: bytes per number.
    """
    head_size = key_size
    per_entry = 0
    if hasattr(attention, "embed_q"):  # MLA expands the latents for every head
        head_size = attention.qk_nope_head_dim
        per_entry = item * query_heads(attention) * (head_size + attention.v_head_dim)
    scores = score_bytes(attention, family, head_size, item)
    return replace(shape, scores=scores, window=window, per_entry=per_entry)


def score_bytes(attention: Any, family: AttentionFamily | None, head_size: int, item: int) -> int:
    """Return the score bytes per query and entry for all heads, at `item` bytes per number.

    Return 0 if a fused kernel supports this head size. MLA computes and stores the scores of the positional parts
    separately, unless its family joins both parts.
    """
    arrays = 1
    if hasattr(attention, "embed_q"):
        arrays = 2 if family is None or family.factor is None else 1
    elif family is not None and family.sinks_of(attention) is not None:
        arrays = 3  # a column for the sinks is appended and removed again
    if is_fused(head_size):
        arrays = 1 if arrays == 2 else 0  # only the separate positional scores are stored
    return item * query_heads(attention) * arrays


def _projected(modules: list[Any]) -> int:
    """Return how many numbers a layer's projections compute per token."""
    experts = max(1, *map(experts_per_token, modules))
    n_numbers = 0
    for module in modules:
        name = type(module).__name__
        weight = module.get("weight")
        if weight is None or weight.ndim < 2 or "Embedding" in name:
            continue
        # Expert projections have a third axis. Convolutions compute one number per channel.
        outputs = weight.shape[0] if "Conv" in name else weight.shape[-2]
        n_numbers += outputs * (experts if "Switch" in name else 1)
    return n_numbers


def without_weights(folder: str | Path) -> nn.Module:
    """Load the model in a folder with placeholder weights that have the right shapes."""
    changes = unread_parameters(load_config(Path(folder))).changes
    model, _ = load_model(Path(folder), lazy=True, model_config=changes)
    blank = tree_map(lambda x: mx.broadcast_to(mx.zeros((), x.dtype), x.shape), model.parameters())
    model.update(blank)
    return model


def repository_without_weights(name: str) -> nn.Module:
    """Load a model from Hugging Face with placeholder weights. Only the config and the weights' headers are fetched."""
    from huggingface_hub import get_safetensors_metadata, hf_hub_download

    config = Path(hf_hub_download(name, "config.json"))
    headers = get_safetensors_metadata(name).files_metadata
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_bytes(config.read_bytes())
        for file, header in headers.items():
            tensors = {name: vars(tensor) for name, tensor in header.tensors.items()}
            _write_empty(Path(folder) / Path(file).name, tensors)
        return without_weights(folder)


def _write_empty(path: Path, tensors: dict[str, dict[str, Any]]) -> None:
    """Write a safetensors file that has a header for `tensors`, but a sparse hole in place of the data."""
    header = json.dumps(tensors).encode()
    end = max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)
