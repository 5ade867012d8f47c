"""The shapes of a model's layers, its weights loaded or not, and the bytes that they hold while they read a chunk."""

import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.models.cache import ArraysCache
from mlx_lm.utils import load_config, load_model

from ..caches.layers import members
from ..errors import UnsupportedModelError
from ..models import attentions
from ..models.counts import experts_per_token, hidden_size, query_heads
from ..models.family import AttentionFamily
from ..models.rope_parameters import taken_over
from ..policies.budgets import UNLIMITED
from .footprint import EntrySizes, window_of
from .scores import LEAST, is_fused, tokens_at_once

METAL = mx.metal.is_available()
_PRECISE = 0 if METAL else 4  # bytes of a number in norms and RoPE, at least

_SSD_STEP = 256  # tokens that mlx-lm's Mamba 2 reads at a time


@dataclass(frozen=True)
class LayerShape:
    """The bytes that a decoder layer holds while it reads a chunk."""

    per_token: int  # of each token of the chunk
    pairs: int  # of each pair of up to 256 of them (Mamba 2)
    scores: int = 0  # of each query and each entry that it sees, unless a kernel computes them
    window: int = 0  # entries that a query sees at most
    per_entry: int = 0  # of each entry in the cache
    before: int = 0  # entries seen in the layer before, if a first chunk holds its scores as well

    def held(self, chunk: int, end: int, most: int, limit: int | None = None) -> int:
        """Bytes held while the `chunk` tokens before `end` are read, where full caches have at most `most` entries.

        With a `limit` of the scores, the chunk is read in pieces: of the largest its tokens count, of any its scores.
        """
        seen = min(end, most if self.window == UNLIMITED else self.window + chunk - 1)
        if chunk == end and self.before:  # later, caches are copied in between
            seen += min(end, self.before + chunk - 1)
        scores = self.scores * chunk * seen
        if limit is not None and self.scores:
            scores = min(scores, max(limit, self.scores * LEAST * seen))
            chunk = min(chunk, tokens_at_once(0, self.scores, limit))
        total = scores + self.per_entry * seen + self.per_token * chunk
        return total + self.pairs * _SSD_STEP * min(chunk, _SSD_STEP)


class _Cache:
    """A layer's cache: the `window` that its queries see, 0 without attention; sizes of a key and a linear state."""

    def __init__(self, cache: Any):
        linear: list[Any] = [c for c in members([cache]) if isinstance(c, ArraysCache)]
        self.state = max((x.size for c in linear for x in c.cache if x is not None), default=0)
        found = _holding([cache])
        self.window = (window_of(found[0]) or UNLIMITED) if found else 0
        self.key_size = found[0].keys.shape[-1] if found else 0


def layer_shapes(model: Any, sizes: EntrySizes) -> set[LayerShape]:
    """The distinct shapes of a model's layers except the last, whose attention a chunk does not compute."""
    layers, caches = list(model.layers), [_Cache(cache) for cache in sizes.caches]
    if len(caches) != len(layers):  # some layers have no cache of their own, or several
        caches = [max(caches, key=lambda cache: cache.window)] * len(layers)
    item = min((c.keys.dtype.size for c in _holding(sizes.caches)), default=4)
    families = _families(model)
    hidden = hidden_size(model)
    shapes, before, busy = {LayerShape(0, 0)}, 0, 0
    for layer, cache in zip(layers[:-1], caches):
        modules = layer.modules()
        readers = [x for x in modules if id(x) in families] if cache.window else []
        shape, states = _without_attention(modules, cache, hidden, item)
        if readers:
            attention = max(readers, key=query_heads)
            # MLX's CPU backend allocates a hundred tasks ahead, and a layer with a single norm may be shorter.
            seen = before if sum("Norm" in type(x).__name__ for x in modules) == 1 else 0
            shape = _attending(shape, attention, families[id(attention)], cache, item, seen)
            # It computes all of a layer's linear states first, and the next layer begins meanwhile.
            shape = replace(shape, per_token=max(busy, shape.per_token))
        shapes.add(shape)
        before, busy = cache.window, states
    return shapes


def _holding(caches: Any) -> list[Any]:
    return [c for c in members(caches) if not isinstance(c, ArraysCache) and not c.empty()]


def _families(model: Any) -> dict[int, AttentionFamily | None]:
    """The families of a model's attention modules by the modules' ids; None where they are not known."""
    try:
        found = attentions(model)
    except UnsupportedModelError:
        return {id(module): None for module in model.modules() if query_heads(module)}
    return {id(module): x.family for x in found for module in (x.attention, *x.borrowers)}


def _attending(
    shape: LayerShape,
    attention: Any,
    family: AttentionFamily | None,
    cache: _Cache,
    item: int,
    before: int,
) -> LayerShape:
    heads, size, per_entry = query_heads(attention), cache.key_size, 0
    if hasattr(attention, "embed_q"):  # MLA's latents, expanded for every head
        size = attention.qk_nope_head_dim
        per_entry = item * heads * (size + attention.v_head_dim)
    return replace(
        shape,
        per_token=shape.per_token + max(item, _PRECISE) * 4 * heads * size,
        scores=score_bytes(attention, family, size, item),
        window=cache.window,
        per_entry=per_entry,
        before=before if family and family.rotates and family.rope_of(attention) is None else 0,
    )


def score_bytes(attention: Any, family: AttentionFamily | None, head_size: int, item: int) -> int:
    """Bytes that are stored for each query of a chunk and each entry it sees, of all heads, in numbers of `item` bytes.

    Nothing where a kernel of the device computes heads of this size. MLA's scores of positional parts are made apart,
    unless both parts come together, and stored in any case.
    """
    arrays = 1
    if hasattr(attention, "embed_q"):
        arrays = 2 if family is None or family.factor is None else 1
    elif family is not None and family.sinks_of(attention) is not None:
        arrays = 3  # a column is joined to them for the sinks, and taken off again
    if is_fused(head_size):
        arrays = int(arrays == 2)
    return item * query_heads(attention) * arrays


def _without_attention(
    modules: list[Any], cache: _Cache, hidden: int, item: int
) -> tuple[LayerShape, int]:
    """The shape of a layer without its attention, and bytes per token that it may hold while the next one begins."""
    made = normed = experts = switched = pairs = latents = loops = 0
    for module in modules:
        name, weight, decay = type(module).__name__, module.get("weight"), module.get("A_log")
        experts = experts or experts_per_token(module)
        latents += "embed_q" in module  # of attentions, which LongCat has two of in a layer
        if decay is not None and decay.ndim == 2:  # Mamba's states of all tokens
            made += 12 * decay.size
        elif decay is not None and "D" in module:
            # Mamba 2's matrix of pairs is repeated, masked, summed, exponentiated and multiplied, in float32.
            pairs = 6 * 4 * decay.size
        elif decay is not None:  # gated delta rules loop over the tokens where there is no kernel
            loops += not METAL
        if weight is None or "Embedding" in name:
            continue
        if weight.ndim == 1:
            normed += weight.size
        elif "Switch" in name:
            switched += weight.shape[-2]
        elif "Conv" in name:  # a padded copy, a kernel's inputs side by side, and the result
            made += weight.shape[0] * (weight.shape[1] + 3)
        else:
            made += weight.size // weight.shape[-1]
    if switched:  # a token goes to its experts, and their results come back
        made += max(1, experts) * (switched + 2 * hidden)
    per_token = (item * made + max(item, _PRECISE) * (3 * hidden + normed)) // max(1, latents)
    if loops:
        per_token = max(per_token, per_token // 4 + int(4.4 * cache.state))
    return LayerShape(per_token, pairs), per_token if loops and not switched else 0


def without_weights(folder: str | Path) -> nn.Module:
    """The model of a folder as mlx-lm loads it, with blank weights: only the shapes are meaningful."""
    changes = taken_over(load_config(Path(folder))).changes
    model, _ = load_model(Path(folder), lazy=True, model_config=changes)
    blank = tree_map(lambda x: mx.broadcast_to(mx.zeros((), x.dtype), x.shape), model.parameters())
    model.update(blank)
    return model


def repository_without_weights(name: str) -> nn.Module:
    """The same for a Hugging Face repository, of which only the configuration and the headers are downloaded."""
    from huggingface_hub import get_safetensors_metadata, hf_hub_download

    config = Path(hf_hub_download(name, "config.json"))
    headers = get_safetensors_metadata(name).files_metadata
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_bytes(config.read_bytes())
        for file, header in headers.items():
            _write_empty(
                Path(folder) / Path(file).name, {k: vars(x) for k, x in header.tensors.items()}
            )
        return without_weights(folder)


def _write_empty(path: Path, tensors: dict[str, dict[str, Any]]) -> None:
    """A safetensors file with its header and a sparse hole for its data."""
    header = json.dumps(tensors).encode()
    end = max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)
