"""A model's layers whose entries can be compressed, and their places in a prompt cache."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, make_prompt_cache

from ..entries.quantization import BITS, Quantization, arrays, fitting_groups
from ..errors import Option, OptionError, UnsupportedModelError
from ..models import attentions, type_of
from ..models.distributed import PIPELINE, split_of
from ..models.family import AttentionFamily
from ..models.rope import mean_rotation, undo_rope
from .adapter import has_all_entries, layer_cache
from .contract import LayerCache


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """A layer whose entries can be compressed, as policies see it too."""

    index: int  # its entry of the prompt cache
    member: int | None  # its place in that entry if it is a `CacheList`, else None
    attention: Any  # the attention module, of the class that `family` describes
    family: AttentionFamily
    borrowers: tuple[Any, ...] = ()  # later layers' attention modules that read its entries
    number: int = 0  # its own, from 0, among the full-attention layers here

    def cache_in(self, prompt_cache: list) -> Any:
        entry = prompt_cache[self.index]
        return entry if self.member is None else entry[self.member]

    def entries_in(self, prompt_cache: list) -> LayerCache:
        return layer_cache(self.cache_in(prompt_cache))

    def put(self, prompt_cache: list, cache: Any) -> None:
        """Replace the layer's cache; a `CacheList` around it is made anew."""
        if self.member is not None:
            caches = list(prompt_cache[self.index].caches)
            caches[self.member] = cache
            cache = CacheList(*caches)
        prompt_cache[self.index] = cache

    @property
    def latent(self) -> bool:
        """Whether the entries are latents, and keys' positional parts; see `Entries`."""
        return self.family.latent

    @property
    def cap(self) -> float | None:
        return getattr(self.attention, self.family.cap) if self.family.cap else None

    @property
    def readers(self) -> tuple[Any, ...]:
        """The attention modules that read the entries, its own first."""
        return self.attention, *self.borrowers

    @property
    def rope(self) -> Any | None:
        """The module that rotates queries and keys; None if the family has none."""
        return self.family.rope_of(self.attention)

    def undo_rope(self, queries: mx.array, offset: int) -> mx.array:
        """Queries `(B, n_heads, n, head_dim)` of positions from `offset` on, as they were before the RoPE, float32."""
        rope = self.rope
        return self.family.turned(self.attention, queries, lambda x: undo_rope(rope, x, offset))

    def mean_rotation(self, head_dim: int, start: int, n: int) -> mx.array:
        """The mean of the matrices that turn queries at `[start, start + n)`, float32 `(head_dim, head_dim)`."""
        rope, units = self.rope, mx.eye(head_dim)[None, None]
        turned = self.family.turned(
            self.attention, units, lambda x: x @ mean_rotation(rope, x.shape[3], start, n).T
        )
        return turned[0, 0].T

    def grouped(self, heads: mx.array, n_kv_heads: int) -> mx.array:
        """What is `(B, n_heads, ...)`, the heads of all `readers`, with each KV head's together."""
        parts = mx.split(heads, len(self.readers), axis=1)
        grouped = (self.family.grouped(x, n_kv_heads) for x in parts)
        groups = [mx.unflatten(x, 1, (n_kv_heads, -1)) for x in grouped]
        return mx.concatenate(groups, axis=2).flatten(1, 2)

    def __deepcopy__(self, memo: dict) -> AttentionLayer:
        return self  # a copied cache serves the same model


def attention_layers(model, prompt_cache: list) -> list[AttentionLayer]:
    """The full-attention layers of `model`, with a plain `KVCache` or one of ours; not linear or sliding-window ones.

    Raises: UnsupportedModelError: there is none, or the model type is not one that can be compressed.
    """
    found = attentions(model)
    holding = [slot for slot in slots(prompt_cache) if not isinstance(slot[2], ArraysCache)]
    # More caches than layers: a loop over the layers, each pass with caches of its own.
    if len(holding) % len(found):
        raise UnsupportedModelError(
            f"{len(holding)} caches with entries for {len(found)} attention layers: "
            "give a prompt cache that mlx-lm's make_prompt_cache made for this model"
        )
    full = [
        (index, member, owner.attention, owner.family, tuple(owner.borrowers))
        for (index, member, cache), owner in zip(holding, itertools.cycle(found))
        if owner.attention is not None and has_all_entries(cache)
    ]
    if not full:
        where = " on this Mac: start fewer" if split_of(model) == PIPELINE else ""
        raise UnsupportedModelError(
            f"model type {type_of(model)!r} has no full-attention layer with a plain KV cache to compress{where}"
        )
    return [AttentionLayer(*layer, number) for number, layer in enumerate(full)]


def token_caches(model) -> list:
    """A model's caches after one token, for the shapes of what they hold: nothing is computed."""
    caches = make_prompt_cache(model)
    model(mx.zeros((1, 1), mx.int32), cache=caches)
    return caches


def first_sparse(prompt_cache: list) -> int | None:
    """The first position whose entries were computed from few of those before; None if no entries were."""
    found = (cache.sparse_from for cache in layer_caches(prompt_cache))
    return min((n for n in found if n is not None), default=None)


def head_sizes(model, layers: list[AttentionLayer]) -> set[int]:
    caches = token_caches(model)
    return {x.shape[3] for layer in layers for x in layer.cache_in(caches).keys_and_values()}


def require_quantised_attention(layers: list[AttentionLayer], remedy: str, option: Option) -> None:
    """Raises: UnsupportedModelError: the model's forward pass in mlx-lm reads plain entries only."""
    for layer in layers:
        plain_only = layer.family.plain_only
        if why := plain_only and plain_only(list(layer.readers)):
            raise UnsupportedModelError(f"{{}}: {remedy}", why, option)


def require_quantizable(model, layers: list[AttentionLayer], quantization: Quantization) -> None:
    """Raises, before the prompt is read:
    SnapKVError: the number of bits or the group size is not possible.
    UnsupportedModelError: mlx-lm's quantised attention does not serve the model.
    """
    if quantization.bits not in BITS:
        raise OptionError("kv_bits", ", ".join(map(str, BITS)), quantization.bits)
    if any(layer.family.sinks for layer in layers):
        raise UnsupportedModelError(
            "mlx-lm's quantised attention has no attention sinks, which this model needs: drop {}",
            Option("kv_bits"),
        )
    require_quantised_attention(layers, "drop {}", Option("kv_bits"))
    sizes = head_sizes(model, layers)
    fitting = fitting_groups(sizes, Option("kv_bits"))
    if quantization.group_size not in fitting:
        allowed = f"one of {fitting} for heads of size {sorted(sizes)}"
        raise OptionError("kv_group_size", allowed, quantization.group_size)


def slots(prompt_cache: list) -> list[tuple[int, int | None, Any]]:
    """Every cache, with its place in the prompt cache and in a `CacheList` there."""
    return [
        (index, member if isinstance(entry, CacheList) else None, cache)
        for index, entry in enumerate(prompt_cache)
        for member, cache in enumerate(entry.caches if isinstance(entry, CacheList) else [entry])
    ]


def members(prompt_cache: list) -> list:
    """Every cache of a prompt cache, those inside a `CacheList` one by one."""
    return [cache for _, _, cache in slots(prompt_cache)]


def layer_caches(prompt_cache: list) -> list[LayerCache]:
    return [layer_cache(cache) for cache in members(prompt_cache)]


def held_tokens(model, prompt_cache: list) -> int:
    """Tokens that a prompt cache has read."""
    return attention_layers(model, prompt_cache)[0].entries_in(prompt_cache).offset


def kv_dtype(cache: LayerCache) -> str:
    """The dtype of a layer's entries: "float16", say, or "8 bits"."""
    stored = None if cache.store is None else cache.store.quantization
    if (how := cache.quantization or stored) is not None:
        return f"{how.bits} bits"
    return str(arrays(cache.sample)[0].dtype).removeprefix("mlx.core.")


def kv_bytes(prompt_cache: list) -> int:
    return sum(cache.kv_nbytes for cache in layer_caches(prompt_cache))


def memory_bytes(prompt_cache: list) -> int:
    """Bytes in memory of all caches: linear states, sliding windows, keys and values, stores and indexes."""
    caches = members(prompt_cache)
    return sum(max(cache.nbytes, layer_cache(cache).kv_nbytes) for cache in caches)


def file_bytes(prompt_cache: list) -> int:
    return sum(cache.file_nbytes for cache in layer_caches(prompt_cache))


def copies_but_entries(prompt_cache: list, layers: list[AttentionLayer]) -> list:
    """The same list with copies of all caches but those of the full-attention layers."""
    memo = {id(cache): cache for cache in (layer.cache_in(prompt_cache) for layer in layers)}
    return [copy.deepcopy(cache, memo) for cache in prompt_cache]


def is_compressed(prompt_cache: list) -> bool:
    """Whether any layer's entries were chosen from, or are going to be."""
    return any(cache.is_compressed for cache in layer_caches(prompt_cache))
