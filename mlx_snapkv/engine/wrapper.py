"""Models as mlx-lm's loops see them, with something done around their calls."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn


class WrappedModel(nn.Module):
    """An mlx-lm model in `self["wrapped"]`, whose attributes are this one's too."""

    def __init__(self, model):
        super().__init__()
        self["wrapped"] = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self["wrapped"], name)

    def __call__(self, inputs: mx.array, cache: list, **kwargs: Any) -> mx.array:
        """Logits `(B, L, vocab_size)` of tokens `(B, L)`; with `kwargs`, the model's own call."""
        return self["wrapped"](inputs, cache=cache, **kwargs)


Answering = Callable[[mx.array, list], mx.array]


class Answered(WrappedModel):
    """A model whose calls are made by `answering(inputs, cache)`, once there is such.

    Attributes:
        answering: gives logits that follow tokens `(1, L)`: `(1, n, vocab_size)` for the last `n`, at least 1.
    """

    answering: Answering | None = None

    def __call__(self, inputs: mx.array, cache: list, **kwargs: Any) -> mx.array:
        if self.answering is None or kwargs:
            return super().__call__(inputs, cache, **kwargs)
        return self.answering(inputs, cache)
