"""One Mac's share of a prompt cache, and the whole of all shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import ArraysCache

from ..caches.evicting import EvictingCache
from ..caches.layers import members
from ..errors import SnapKVError
from ..several.part import PIPELINE


def joined(shares: Sequence[list], kind: str) -> list:
    """The whole prompt cache, given those of all ranks, in order of rank, each with its layers or its heads.

    Raises:
        SnapKVError: they don't go together.
    """
    if kind == PIPELINE:
        whole = [cache for share in reversed(shares) for cache in share]
        return _uniform_if_equal(whole)
    if len({tuple(map(type, share)) for share in shares}) != 1:
        raise SnapKVError("its parts hold caches of different kinds")
    return [_of_all_heads(caches) for caches in zip(*shares)]


def share_of(whole: list, kind: str, rank: int, counts: Sequence[int]) -> list:
    """A rank's share of a whole prompt cache.

    Args:
        counts: by rank, how many caches each has.

    Raises:
        SnapKVError: the cache can't be shared out so.
    """
    if kind == PIPELINE:
        if len(whole) != sum(counts):
            raise SnapKVError(f"it has {len(whole)} caches, the model has {sum(counts)}")
        before = sum(counts[rank + 1 :])
        return whole[before : before + counts[rank]]
    return [_of_some_heads(cache, rank, len(counts)) for cache in whole]


def _of_all_heads(caches: Sequence[Any]) -> Any:
    def joint(values: Sequence[Any]) -> Any:
        if not isinstance(values[0], mx.array):
            if any(value != values[0] for value in values):
                raise SnapKVError("its parts hold different numbers of entries")
            return values[0]
        return mx.concatenate(list(values), axis=_head_axis(values[0]))

    return _made(caches, joint)


def _of_some_heads(cache: Any, rank: int, size: int) -> Any:
    def some(values: Sequence[Any]) -> Any:
        (value,) = values
        if not isinstance(value, mx.array):
            return value
        axis = _head_axis(value)
        if value.shape[axis] % size:
            raise SnapKVError(f"its {value.shape[axis]} heads can't be shared out to {size} ranks")
        return mx.split(value, size, axis=axis)[rank]

    return _made([cache], some)


def _head_axis(array: mx.array) -> int:
    """Where a cache's array has the heads: second, or alone, as the logits of attention sinks are."""
    return 0 if array.ndim == 1 else 1


def _made(caches: Sequence[Any], made: Callable[[Sequence[Any]], Any]) -> Any:
    """A cache of the same kind, every value of its state made of those of `caches`."""
    if any(isinstance(cache, ArraysCache) for cache in members(caches)):
        raise SnapKVError(
            "the state of its linear-attention layers can't be shared out or joined by heads: use --pipeline, or as "
            "many ranks as saved it"
        )
    states: list[list] = [list(tree_flatten(cache.state)) for cache in caches]
    if len({tuple(name for name, _ in state) for state in states}) != 1:
        raise SnapKVError("its parts hold caches of different states")
    found = [(pairs[0][0], made([value for _, value in pairs])) for pairs in zip(*states)]
    return type(caches[0]).from_state(tree_unflatten(found))


def _uniform_if_equal(whole: list) -> list:
    """Tell caches that evict whether all layers hold equally many entries, now that all are here."""
    evicting = [cache for cache in members(whole) if isinstance(cache, EvictingCache)]
    equal = len({cache.n_entries for cache in evicting}) == 1
    for cache in evicting:
        cache.tell_uniform(equal)
    return whole
