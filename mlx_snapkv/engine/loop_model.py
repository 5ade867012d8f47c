"""Model wrappers that intercept the model calls in mlx-lm's generation loops."""

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
from ..caches.matching import set_missing_layers
from ..models import attention_classes
from ..models.patch import recording

# If a model call has at least this many tokens, the caches are evaluated in groups of layers. Shorter calls are fast
# enough without this.
LONG_CALL = 32
# Target range for the duration of one evaluation. Shorter evaluations slow prefill down; longer ones delay Ctrl-C.
MIN_SECONDS = 0.1
MAX_SECONDS = 0.5
PROGRESS_INTERVAL = 1.0  # minimum seconds between progress callbacks within a chunk


class WrappedModel(nn.Module):
    """Wraps an mlx-lm model, stored as `self["wrapped"]`, and exposes its attributes."""

    def __init__(self, model):
        """Store the model as a submodule, so that MLX finds its parameters."""
        super().__init__()
        self["wrapped"] = model

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped model."""
        return getattr(self["wrapped"], name)


class RequestModel(WrappedModel):
    """A model that forwards its calls to the request's `call(inputs, cache)`, where `inputs` are token ids `(1, L)`.

    A call returns logits `(1, n, vocab_size)` for the last `n >= 1` tokens.
    """

    def __init__(self, model: Any, request: Any):
        """Wrap the model. Keep only a weak reference to the request, so that its memory is freed promptly."""
        super().__init__(model)
        self._request = weakref.proxy(request)  # the request refers to this model

    def __call__(self, inputs: mx.array, cache: list) -> mx.array:
        """Forward the call to the request."""
        return self._request.call(inputs, cache)


class SplittingModel(WrappedModel):
    """A model that splits calls at evictions, so that the result matches feeding one token at a time."""

    def __call__(self, inputs: mx.array, cache: list) -> mx.array:
        """Call the model once for each span between evictions, and return all logits `(1, L, vocab_size)`."""
        model = self["wrapped"]
        caches = layer_caches(cache)
        logits = []
        while True:
            n_until_eviction = min(map(_n_until_eviction, caches))
            if n_until_eviction >= inputs.shape[1]:
                break
            n_next = int(n_until_eviction)
            logits.append(model(inputs[:, :n_next], cache=cache))
            inputs = inputs[:, n_next:]
        logits.append(model(inputs, cache=cache))
        return mx.concatenate(logits, axis=1) if len(logits) > 1 else logits[0]


def _n_until_eviction(cache: LayerCache) -> float:
    """Return how many tokens fit before the next eviction. If one is due now, return how many fit after it.

    The result is infinite if the cache never evicts.
    """
    return cache.room if cache.room > 0 else cache.block


def evicts(prompt_cache: list) -> bool:
    """Return whether new tokens may cause a policy to evict entries. Sliding windows do not count."""
    return any(cache.room < math.inf for cache in layer_caches(prompt_cache))


def split_at_evictions(model, prompt_cache: list):
    """Wrap the model in `SplittingModel` if the prompt cache evicts."""
    return SplittingModel(model) if evicts(prompt_cache) else model


@contextlib.contextmanager
def trimming_drafts(prompt_cache: list) -> Iterator[None]:
    """Let mlx-lm's loop trim rejected drafts from compressed caches within the `with` block."""
    compressed: list[Any] = [cache for cache in layer_caches(prompt_cache) if cache.is_compressed]
    for cache in compressed:
        cache.is_drafted = True
    try:
        yield
    finally:
        for cache in compressed:
            cache.is_drafted = False


class Evaluation:
    """Evaluates caches in groups of layers. Adapts the group size to the time that evaluations take.

    A group should take between `MIN_SECONDS` and `MAX_SECONDS`. Python can handle Ctrl-C between groups.
    """

    def __init__(self):
        """Start with groups of one layer."""
        self._n_layers = 1

    def __call__(self, cache: list, on_layers: Callable[[int], None] = lambda n: None) -> None:
        """Evaluate all caches.

        After each group but the last, call `on_layers` with the number of layers evaluated so far.
        """
        n_done = 0
        while n_done < len(cache):
            started = time.perf_counter()
            group = cache[n_done : n_done + self._n_layers]
            mx.eval([layer_cache.state for layer_cache in group])
            n_done += self._n_layers
            seconds = time.perf_counter() - started
            if seconds < MIN_SECONDS:
                self._n_layers *= 2
            elif seconds > MAX_SECONDS:
                self._n_layers = max(1, self._n_layers // 2)
            if n_done < len(cache):
                on_layers(n_done)


class PacedModel(WrappedModel):
    """A model that evaluates long chunks in groups of layers, so that Ctrl-C works in the middle of a chunk.

    Logits are unchanged.

    Args:
        model: the model to wrap.
        progress: mlx-lm's `prompt_progress_callback`. It is also called about once a second within a long chunk.
    """

    def __init__(self, model, progress: Callable[[int, int], None]):
        """Wrap the model."""
        super().__init__(model)
        self._progress_callback = progress
        self._evaluate = Evaluation()
        self._n_done = 0
        self._n_total = 0
        self._reported_at = time.perf_counter()

    def report(self, n_done: int, n_total: int) -> None:
        """Report that `n_done` of `n_total` prompt tokens have been read."""
        self._n_done = n_done
        self._n_total = n_total
        self._reported_at = time.perf_counter()
        self._progress_callback(n_done, n_total)

    def __call__(self, inputs: mx.array, cache: list) -> mx.array:
        """Call the wrapped model, and evaluate the caches if the chunk is long."""
        logits = self["wrapped"](inputs, cache=cache)
        n_tokens = inputs.shape[1]
        if n_tokens >= LONG_CALL:
            self._evaluate(cache, lambda n: self._report_part(n / len(cache), n_tokens))
        return logits

    def _report_part(self, fraction: float, n_tokens: int) -> None:
        """Report that a fraction of a chunk has been read, unless the last report is less than a second old."""
        now = time.perf_counter()
        if now - self._reported_at > PROGRESS_INTERVAL:
            self._reported_at = now
            self._progress_callback(self._n_done + int(n_tokens * fraction), self._n_total)


def with_pacing(start: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """Wrap mlx-lm's `start(model, **options)` to use a `PacedModel` if there is a `prompt_progress_callback`.

    A prompt given as embeddings is not paced, because mlx-lm requires an `input_embeddings` parameter in the model's
    `__call__`, and `PacedModel.__call__` does not have one.
    """

    def start_paced(model: Any, **options: Any) -> Iterator[Any]:
        progress = options.get("prompt_progress_callback")
        if progress is None or options.get("input_embeddings") is not None:
            return start(model, **options)
        paced_model = PacedModel(model, progress)
        return start(paced_model, **options | {"prompt_progress_callback": paced_model.report})

    return start_paced


def observing_queries(model, prompt_cache: list) -> contextlib.AbstractContextManager[None]:
    """Patch the attention classes within the `with` block if a cache needs the queries of upcoming tokens."""
    # Caches loaded by mlx-lm have no reference to their layers.
    set_missing_layers(prompt_cache, model)
    needs_queries = any(cache.observes for cache in layer_caches(prompt_cache))
    return recording(attention_classes(model) if needs_queries else [])
