"""Models for mlx-lm's loops that compute what another model does, their own way."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..caches.layers import members
from ..caches.self_evicting import SelfEvicting


class WrappedModel(nn.Module):
    """What such a model has in common with all others: the other's attributes are its own.

    Args:
        model: an mlx-lm model, in `self["wrapped"]`.
    """

    def __init__(self, model):
        super().__init__()
        self["wrapped"] = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self["wrapped"], name)


class OneByOne(WrappedModel):
    """A model that takes in several tokens as if they came one by one, on caches that evict by themselves.

    Such a cache evicts when it is full, and sooner if several tokens at once would not fit in. So a call that would
    cross that point is made in two pieces or more, and every eviction comes when it would come to single tokens.
    """

    def __call__(self, inputs: mx.array, cache: list, **kwargs: Any) -> mx.array:
        """Logits `(B, L, vocab_size)` of tokens `(B, L)`; with `kwargs`, the model's own call."""
        model = self["wrapped"]
        caches = [c for c in members(cache) if isinstance(c, SelfEvicting)]
        logits = []
        while not kwargs and inputs.shape[1] > (n := min(map(_fitting, caches))):
            logits.append(model(inputs[:, :n], cache=cache))
            inputs = inputs[:, n:]
        logits.append(model(inputs, cache=cache, **kwargs))
        return mx.concatenate(logits, axis=1) if len(logits) > 1 else logits[0]


def one_by_one(model, prompt_cache: list):
    """The model to go on with from a prompt cache: itself, unless caches evict by themselves."""
    evicts = any(isinstance(cache, SelfEvicting) for cache in members(prompt_cache))
    return OneByOne(model) if evicts else model


def _fitting(cache: SelfEvicting) -> int:
    """Tokens that fit in before the next eviction, or behind one that is due."""
    return cache.room if cache.room > 0 else cache.block
