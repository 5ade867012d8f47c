"""Models for mlx-lm's loops that take several tokens in as if they came one by one."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from ..caches.contract import LayerCache
from ..caches.layers import layer_caches
from .wrapper import WrappedModel


class SplitCalls(WrappedModel):
    """A model that takes in several tokens as if they came one by one, on caches whose entries give way.

    Such a cache evicts when it is full, and sooner if several tokens at once would not fit in. So a call that would
    cross that point is made in two pieces or more, and every eviction comes when it would come to single tokens.

    Args:
        model: an mlx-lm model.
        marks: mark the caches before every call, so that its tokens can be taken back.
    """

    def __init__(self, model, marks: bool = False):
        super().__init__(model)
        self._marks = marks

    def __call__(self, inputs: mx.array, cache: list, **kwargs: Any) -> mx.array:
        model = self["wrapped"]
        caches = layer_caches(cache)
        if self._marks:
            for c in caches:
                c.mark()
        logits = []
        while not kwargs and inputs.shape[1] > (n := min(map(_fitting, caches))):
            logits.append(model(inputs[:, : int(n)], cache=cache))
            inputs = inputs[:, int(n) :]
        logits.append(model(inputs, cache=cache, **kwargs))
        return mx.concatenate(logits, axis=1) if len(logits) > 1 else logits[0]


def gives_way(prompt_cache: list) -> bool:
    """Whether entries give way as tokens are fed, not just the oldest of a window."""
    return any(cache.room < math.inf for cache in layer_caches(prompt_cache))


def one_by_one(model, prompt_cache: list):
    """The model to go on with from a prompt cache: itself, unless entries give way."""
    return SplitCalls(model) if gives_way(prompt_cache) else model


@contextlib.contextmanager
def rewinding(model, prompt_cache: list) -> Iterator[SplitCalls]:
    """A model whose last call can be taken back from `prompt_cache`, for the block, by mlx-lm's `trim_prompt_cache`."""
    caches = layer_caches(prompt_cache)
    for cache in caches:
        cache.mark()
    try:
        yield SplitCalls(model, marks=True)
    finally:
        for cache in caches:
            cache.commit()


def _fitting(cache: LayerCache) -> float:
    """Tokens that fit in before the next eviction, or behind one that is due."""
    return cache.room if cache.room > 0 else cache.block
