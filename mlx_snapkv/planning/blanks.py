"""Arrays of any shape that take no memory, in the place of weights and caches."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import CacheList


def blank(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """An array that is there and holds a single number."""
    array = mx.broadcast_to(mx.zeros((), dtype), shape)
    mx.eval(array)
    return array


def blanks(tree: Any) -> Any:
    """The same tree with blank arrays."""
    return tree_map(lambda x: blank(x.shape, x.dtype) if isinstance(x, mx.array) else x, tree)


def blanked(cache: Any) -> Any:
    """A copy of a cache with blank arrays of its own."""
    if isinstance(cache, CacheList):
        return CacheList(*map(blanked, cache.caches))
    made = copy.copy(cache)
    vars(made).update({name: blanks(value) for name, value in vars(cache).items()})
    return made


@contextlib.contextmanager
def blank_weights(model: Any) -> Iterator[None]:
    """Blank weights in the place of a model's own, loaded or not; what else it keeps is computed."""
    weights = model.parameters()
    kept = [x for module in model.modules() for x in module.values() if isinstance(x, mx.array)]
    model.update(blanks(weights))
    own = {id(x) for x in arrays_of(weights)}
    try:
        mx.eval([x for x in kept if id(x) not in own])
        yield
    finally:
        model.update(weights)


def arrays_of(tree: Any) -> list[mx.array]:
    found: Any = tree_flatten(tree)
    return [x for _, x in found if isinstance(x, mx.array)]
