"""Whether loaded caches are those of a model, told by what one token leaves in fresh ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from ..caches.block import BlockKVCache
from ..caches.layers import members
from ..caches.quantized import (
    QuantizedBlockKVCache,
    QuantizedCache,
    QuantizedReselectingSnapKVCache,
    QuantizedSnapKVCache,
)
from ..caches.reselecting import ReselectingSnapKVCache
from ..caches.window import SnapKVCache
from ..entries.quantization import arrays
from ..errors import SnapKVError

# What may have taken the place of a plain cache of keys and values.
INSTEAD = (
    KVCache,
    RotatingKVCache,
    QuantizedKVCache,
    SnapKVCache,
    QuantizedSnapKVCache,
    ReselectingSnapKVCache,
    QuantizedReselectingSnapKVCache,
    BlockKVCache,
    QuantizedBlockKVCache,
)


def require_match(prompt_cache: list, model) -> None:
    """Raises: SnapKVError: the caches don't have the model's layers, kinds, heads, head size and dtype."""
    fresh = make_prompt_cache(model)
    model(mx.array([[0]]), cache=fresh)
    _require_kinds(prompt_cache, fresh)
    pairs = zip(members(prompt_cache), members(fresh))
    for n, (cache, like) in enumerate(pairs):
        try:
            problem = _problem(cache, like)
        except Exception:  # a state of another kind than the class keeps
            problem = "holds something else than its class says"
        if problem is not None:
            raise SnapKVError(f"cache {n}, a {type(cache).__name__}, {problem}")


def require_tokens(prompt_cache: list, n_tokens: int | None) -> None:
    """Raises: SnapKVError: the layers hold different numbers of tokens, or not `n_tokens`."""
    caches = [c for c in members(prompt_cache) if isinstance(c, INSTEAD) and not c.empty()]
    counts = sorted({c.offset for c in caches})
    if len(counts) > 1:
        raise SnapKVError(f"its layers hold different numbers of tokens: {counts}")
    if n_tokens == 0 or all(c.empty() for c in members(prompt_cache)):
        raise SnapKVError("it holds no tokens")
    if counts and n_tokens is not None and counts != [n_tokens]:
        raise SnapKVError(f"its layers hold {counts[0]} tokens, the prompt has {n_tokens}")


def _require_kinds(found: Sequence, wanted: Sequence) -> None:
    if len(found) != len(wanted):
        raise SnapKVError(f"it has {len(found)} caches, the model has {len(wanted)}")
    for cache, like in zip(found, wanted):
        same = type(cache) is type(like)
        if not same and not (type(like) is KVCache and type(cache) in INSTEAD):
            raise SnapKVError(
                f"it has a {type(cache).__name__} where the model has a {type(like).__name__}"
            )
        if isinstance(cache, CacheList):
            _require_kinds(cache.caches, like.caches)


def _problem(cache, like) -> str | None:
    """What is wrong with a cache that should hold what `like` holds, with more tokens."""
    if cache.empty() != like.empty():
        return "is empty" if cache.empty() else "should be empty"
    if cache.empty():
        return None
    if not isinstance(cache, INSTEAD):
        return _difference(cache.state, like.state, exact=isinstance(cache, ArraysCache))
    keys = like.keys  # plain, as queries are
    if isinstance(cache, (QuantizedKVCache, QuantizedCache)):
        like = like.to_quantized(cache.group_size, cache.bits)
    difference = _difference((cache.keys, cache.values), (like.keys, like.values))
    if difference is not None:
        return difference
    rows = {array.shape[2] for array in _arrays((cache.keys, cache.values)).values()}
    if len(rows) != 1:
        return f"has {sorted(rows)} rows of keys and values"
    return (
        None if _counts_agree(cache, rows.pop(), keys) else "has numbers that contradict each other"
    )


def _difference(found, wanted, exact: bool = False) -> str | None:
    """Arrays that differ in place, dtype or shape; unless `exact`, the number of rows may."""
    have, want = _arrays(found), _arrays(wanted)
    if have.keys() != want.keys():
        return "holds other arrays than the model's"
    for name, array in have.items():
        other = want[name]
        if array.dtype != other.dtype:
            return f"holds {array.dtype}, the model {other.dtype}".replace("mlx.core.", "")
        if array.ndim != other.ndim:
            return f"holds an array of shape {array.shape}, the model {other.shape}"
        for axis, (n, m) in enumerate(zip(array.shape, other.shape)):
            if n != m and (exact or axis != array.ndim - 2):
                return f"holds an array of shape {array.shape}, the model {other.shape}"
    return None


def _arrays(tree) -> dict[str, mx.array]:
    """The arrays of a state by their place in it."""
    leaves = dict(tree_flatten(tree))
    return {name: leaf for name, leaf in leaves.items() if isinstance(leaf, mx.array)}


def _counts_agree(cache, rows: int, keys: mx.array) -> bool:
    """Whether a cache's bookkeeping goes with its number of rows."""
    if not _is_count(cache.offset, 1):
        return False
    if isinstance(cache, SnapKVCache):
        known = not isinstance(cache, ReselectingSnapKVCache) or _choices_agree(cache, rows, keys)
        return known and _snapkv_agrees(cache, rows)
    if isinstance(cache, BlockKVCache):
        return _block_agrees(cache, rows, keys)
    if isinstance(cache, RotatingKVCache):
        counts = (cache.keep, cache._idx, cache.max_size)
        return all(map(_is_count, counts)) and cache.keep <= cache.max_size and cache._idx <= rows
    return cache.offset <= rows


def _snapkv_agrees(cache: SnapKVCache, rows: int) -> bool:
    positions = cache._pinned_positions
    heads = arrays(cache.keys)[0].shape[:2]
    return (
        positions.shape == (*heads, cache.n_pin)
        and positions.dtype == mx.uint32
        and _is_count(cache.n_window, 1)
        and _is_count(cache._oldest)
        and _is_count(cache._trimmable)
        and isinstance(cache._uniform, bool)
        and cache.n_pin <= rows <= cache.offset
        and cache._oldest < max(1, rows - cache.n_pin)
        and cache._trimmable <= cache.offset
    )


def _choices_agree(cache: ReselectingSnapKVCache, rows: int, keys: mx.array) -> bool:
    left = cache._left
    return (
        _is_count(cache.n_sink)
        and _is_count(cache.block, 1)
        and cache.block <= cache.n_window
        and _is_count(cache._since)
        and _is_count(cache._stop)
        and cache._stop <= cache.offset
        and (cache.newest is None or _is_count(cache.newest))
        and _is_per_row(left, arrays(cache.keys)[0].shape[:2], cache.offset, mx.uint32)
        and (left is None or left.shape[2] + cache._since >= rows - cache.n_pin)
        and all(_are_queries(q, keys) for q in cache._queries)
    )


def _block_agrees(cache: BlockKVCache, rows: int, keys: mx.array) -> bool:
    heads, quota = arrays(cache.keys)[0].shape[:2], cache.quota
    kept, received = cache._kept_positions, cache._received
    return (
        all(map(_is_count, (quota.rows, quota.n_sink, quota.n_window, cache._expected)))
        and quota.n_sink + quota.n_window <= quota.rows
        and _is_count(cache.block, 1)
        and _is_count(cache._n)
        and cache._n <= min(rows, cache.offset)
        and (cache.newest is None or _is_count(cache.newest))
        and _is_count(cache._stop)
        and cache._stop <= cache.offset + cache.block
        and all(isinstance(x, (int, float)) for x in (cache.first, cache.last))
        and all(isinstance(x, bool) for x in (cache.tallies, cache._uniform))
        and _is_per_row(kept, heads, cache._n, mx.uint32)
        and _is_per_row(received, heads, cache._n, mx.float32)
        and all(_are_queries(q, keys) for q in (*cache._queries, *cache._uncounted))
    )


def _is_count(value: Any, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_per_row(array: mx.array | None, heads: tuple, rows: int, dtype: mx.Dtype) -> bool:
    if array is None:
        return True
    shaped = array.ndim == 3 and array.shape[:2] == heads and array.shape[2] <= rows
    return shaped and array.dtype == dtype


def _are_queries(queries: mx.array, keys: mx.array) -> bool:
    B, n_heads, _, D = queries.shape
    return (
        keys.shape[0] == B
        and n_heads % keys.shape[1] == 0
        and keys.shape[3] == D
        and queries.dtype == keys.dtype
    )
