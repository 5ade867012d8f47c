"""A model's layers whose entries can be compressed, and their places in a prompt cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, QuantizedKVCache

from ..entries.queries import Recorder
from ..errors import UnsupportedModelError
from ..models import AttentionFamily, attentions, type_of
from .window import SnapKVCache

# Kinds of caches whose rows can be chosen from; a rotating cache has lost some to no policy.
_WITH_ALL_ROWS = (KVCache, QuantizedKVCache, Recorder, SnapKVCache)


@dataclass(frozen=True)
class AttentionLayer:
    """Rows that can be compressed, and the attention that reads them.

    Attributes:
        index: their entry of the prompt cache.
        member: their place in that entry if it is a `CacheList`, else None.
        attention: the attention module, of the class that `family` describes.
        number: its place among the model's full-attention layers, from 0.
        n_layers: how many those are.
    """

    index: int
    member: int | None
    attention: Any
    family: AttentionFamily
    number: int
    n_layers: int

    @cached_property
    def rope(self) -> Any:
        """The module that turns the layer's queries, called as `rope(x, offset)`; None if nothing does."""
        return self.family.rope_of(self.attention)

    def undo_rope(self, queries: mx.array, offset: int) -> mx.array:
        """Queries `(B, n_heads, n, head_dim)` of positions from `offset` on as they were before RoPE, float32."""
        return self.family.undo_rope(self.attention, self.rope, queries, offset)

    def __deepcopy__(self, memo: dict) -> AttentionLayer:
        """Itself: a copy of a cache that knows its layer copies no weights."""
        return self

    def cache_in(self, prompt_cache: list) -> Any:
        entry = prompt_cache[self.index]
        return entry if self.member is None else entry[self.member]

    def put(self, prompt_cache: list, cache: Any) -> None:
        """Let `cache` take the place of the layer's cache; a `CacheList` around it is made anew."""
        if self.member is not None:
            caches = list(prompt_cache[self.index].caches)
            caches[self.member] = cache
            cache = CacheList(*caches)
        prompt_cache[self.index] = cache


def attention_layers(model, prompt_cache: list) -> list[AttentionLayer]:
    """The full-attention layers of `model`: those with a plain `KVCache` or one of ours.

    Linear, state-space and sliding-window layers keep their caches and are not listed.

    Raises:
        UnsupportedModelError: there is none, or the model type is not one that can be compressed.
    """
    found = attentions(model)
    slots = list(_slots_with_rows(prompt_cache))
    # More caches than layers: a loop over the layers, each pass with caches of its own.
    if len(slots) % len(found):
        raise UnsupportedModelError(
            f"{len(slots)} caches with rows for {len(found)} attention layers: "
            "give a prompt cache that mlx-lm's make_prompt_cache made for this model"
        )
    found_layers: list[tuple[int, int | None, Any, AttentionFamily]] = []
    for n, (index, member, cache) in enumerate(slots):
        attention, family = found[n % len(found)]
        if attention is not None and isinstance(cache, _WITH_ALL_ROWS):
            found_layers.append((index, member, attention, family))
    if not found_layers:
        raise UnsupportedModelError(
            f"model type {type_of(model)!r} has no full-attention layer with a plain KV cache to compress"
        )
    n = len(found_layers)
    return [AttentionLayer(*x, number=i, n_layers=n) for i, x in enumerate(found_layers)]


def attention_classes(layers: list[AttentionLayer]) -> list[type]:
    """The classes of the layers' attention modules, each once."""
    return list(dict.fromkeys(type(layer.attention) for layer in layers))


def members(prompt_cache) -> Iterator[Any]:
    """Every cache of a prompt cache, those inside a `CacheList` one by one."""
    for cache in prompt_cache:
        if isinstance(cache, CacheList):
            yield from members(cache.caches)
        else:
            yield cache


def _slots_with_rows(prompt_cache: list) -> Iterator[tuple[int, int | None, Any]]:
    """Entry, place in its `CacheList` if it is one, and cache, for all that hold keys and values."""
    for index, entry in enumerate(prompt_cache):
        inner = enumerate(entry.caches) if isinstance(entry, CacheList) else [(None, entry)]
        for member, cache in inner:
            if not isinstance(cache, ArraysCache):
                yield index, member, cache
