"""Models as mlx-lm's loops see them, with something done around their calls."""

import contextlib
import math
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..caches.contract import LayerCache
from ..caches.layers import layer_caches
from ..caches.matching import adopt
from ..models import attention_classes
from ..models.patch import recording

LONG_CALL = 32  # tokens from which a call may take long
# Seconds of an evaluation: shorter ones would cost speed, longer ones keep Ctrl-C waiting.
FAST = 0.1
SLOW = 0.5
TELL_EVERY = 1.0  # seconds between two calls of a callback within a chunk


class WrappedModel(nn.Module):
    """An mlx-lm model in `self["wrapped"]`, whose attributes are this one's too."""

    def __init__(self, model):
        """Wrap the model as a submodule, so that its parameters are found."""
        super().__init__()
        self["wrapped"] = model

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped model."""
        return getattr(self["wrapped"], name)


class RequestModel(WrappedModel):
    """A request's model: calls with token ids `(1, L)` go to the request's `call(inputs, cache)`.

    A call returns the logits `(1, n, vocab_size)` after the last `n` tokens, at least 1.
    """

    def __init__(self, model: Any, request: Any):
        """Wrap the model without a reference cycle, so that the request's memory is freed at once."""
        super().__init__(model)
        self._request = weakref.proxy(request)  # the request holds this model

    def __call__(self, inputs: mx.array, cache: list, **kwargs: Any) -> mx.array:
        """Let the request call the model; a call with embeddings goes to the model itself."""
        if kwargs:
            return self["wrapped"](inputs, cache=cache, **kwargs)
        return self._request.call(inputs, cache)


class SplitCalls(WrappedModel):
    """A model that feeds several tokens to caches that evict as if the tokens came one by one.

    A call that would cross an eviction is split there.
    """

    def __call__(self, inputs: mx.array, cache: list, **kwargs: Any) -> mx.array:
        """Return the logits `(1, L, vocab_size)` of all tokens, read in as many calls as there are evictions."""
        model = self["wrapped"]
        caches = layer_caches(cache)
        logits = []
        while not kwargs and inputs.shape[1] > (n := min(map(_fitting, caches))):
            logits.append(model(inputs[:, : int(n)], cache=cache))
            inputs = inputs[:, int(n) :]
        logits.append(model(inputs, cache=cache, **kwargs))
        return mx.concatenate(logits, axis=1) if len(logits) > 1 else logits[0]


def _fitting(cache: LayerCache) -> float:
    """Return how many tokens fit before the next eviction; if one is due, after it."""
    return cache.room if cache.room > 0 else cache.block


def evicts(prompt_cache: list) -> bool:
    """Return whether a policy evicts entries of a cache while tokens are fed; a sliding window does not count."""
    return any(cache.room < math.inf for cache in layer_caches(prompt_cache))


def one_by_one(model, prompt_cache: list):
    """Return the model, wrapped to make its calls token by token if the prompt cache evicts."""
    return SplitCalls(model) if evicts(prompt_cache) else model


@contextlib.contextmanager
def drafted(prompt_cache: list) -> Iterator[None]:
    """Let mlx-lm's loop trim the drafts that it rejects from compressed caches, for the block."""
    compressed: list[Any] = [cache for cache in layer_caches(prompt_cache) if cache.is_compressed]
    for cache in compressed:
        cache.is_drafted = True
    try:
        yield
    finally:
        for cache in compressed:
            cache.is_drafted = False


class Evaluation:
    """Evaluates the caches of chunks, as many layers at a time as take between `FAST` and `SLOW` seconds.

    Between two evaluations Python notices Ctrl-C.
    """

    def __init__(self):
        """Start with one layer at a time."""
        self._n_layers = 1

    def __call__(self, cache: list, on_layers: Callable[[int], None] = lambda n: None) -> None:
        """Evaluate the caches of all layers, and call `on_layers` with the number of layers after some of them."""
        n = 0
        while n < len(cache):
            started = time.perf_counter()
            mx.eval([c.state for c in cache[n : n + self._n_layers]])
            n += self._n_layers
            seconds = time.perf_counter() - started
            if seconds < FAST:
                self._n_layers *= 2
            elif seconds > SLOW:
                self._n_layers = max(1, self._n_layers // 2)
            if n < len(cache):
                on_layers(n)


class PacedModel(WrappedModel):
    """A model whose long chunks are evaluated some layers at a time, so that Ctrl-C is noticed within a chunk.

    The logits stay the same.

    Args:
        model: the model to wrap.
        progress: mlx-lm's `prompt_progress_callback`, also called about once a second within a chunk.
    """

    def __init__(self, model, progress: Callable[[int, int], None]):
        """Wrap the model; no progress is known yet."""
        super().__init__(model)
        self._progress = progress
        self._evaluate = Evaluation()
        self._done = 0
        self._total = 0
        self._told = time.perf_counter()

    def tell(self, done: int, total: int) -> None:
        """Note and report that a number of the prompt's tokens is read."""
        self._done = done
        self._total = total
        self._told = time.perf_counter()
        self._progress(done, total)

    def __call__(self, inputs: mx.array, cache: list, **kwargs: Any) -> mx.array:
        """Return the wrapped model's logits, and evaluate the caches of a long chunk."""
        logits = self["wrapped"](inputs, cache=cache, **kwargs)
        if inputs.shape[1] >= LONG_CALL:
            self._evaluate(cache, lambda n: self._tell_part(n / len(cache), inputs.shape[1]))
        return logits

    def _tell_part(self, part: float, n_tokens: int) -> None:
        """Call `progress` if the last call was `TELL_EVERY` seconds ago; `part` of a chunk's tokens are read."""
        now = time.perf_counter()
        if now - self._told > TELL_EVERY:
            self._told = now
            self._progress(self._done + int(n_tokens * part), self._total)


def pacing(start: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """Return mlx-lm's `start(model, **options)` with its chunks paced if it has a `prompt_progress_callback`."""

    def begin(model: Any, **options: Any) -> Iterator[Any]:
        progress = options.get("prompt_progress_callback")
        if progress is None:
            return start(model, **options)
        paced = PacedModel(model, progress)
        return start(paced, **options | {"prompt_progress_callback": paced.tell})

    return begin


def observing(model, prompt_cache: list) -> contextlib.AbstractContextManager[None]:
    """Patch the model's attention classes for the block if a cache asks for the queries of the tokens it is fed."""
    adopt(prompt_cache, model)  # caches that mlx-lm has loaded from a file don't know their layers
    observed = any(cache.observes for cache in layer_caches(prompt_cache))
    return recording(attention_classes(model) if observed else [])
