"""Decoding with `mx.compile`: on a compressed cache every step has the same shapes, so one trace serves them all."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from .cache import SnapKVCache
from .recorder import Recorder
from .reselecting_cache import ReselectingSnapKVCache
from .wrapped_model import WrappedModel

# Steps that a request decodes plainly first. MLX builds a model's fused kernels at their first use and keeps
# them on disk. On a CPU it runs the C++ compiler for each: 6 to 14 seconds on a fresh machine, which a
# short answer never earns back (docs/compiled-decoding.md). On a GPU nothing was measured, so nothing is compiled.
WAIT = {mx.cpu: 1000, mx.gpu: math.inf}


class CompiledDecoder(WrappedModel):
    """A model for mlx-lm's loop to use in one request: it computes what `model` does, its later steps compiled.

    A call is compiled if it adds one token to caches that are all `SnapKVCache`s with a full window and nothing
    to choose in this step, or `ArraysCache`s, and `wait` such calls came before. The caches then hold what an ordinary
    step would have left in them. Any other call, and every call of a model that can't be traced, is the model's own.

    The weights are those of the first compiled step: changing them afterwards has no effect on the request.

    Args:
        model: an mlx-lm model; its attributes are this one's too.
        wait: steps to leave to the model first; by default what pays on the device.
    """

    def __init__(self, model, wait: float | None = None):
        super().__init__(model)
        self._step = mx.compile(_step_of(model))
        self._wait = WAIT[mx.default_device().type] if wait is None else wait
        self._traceable = True

    def __call__(self, inputs: mx.array, cache: list | None = None, **kwargs: Any) -> mx.array:
        """Logits `(B, L, vocab_size)` of tokens `(B, L)`."""
        model = self["wrapped"]
        place = None if kwargs or not self._traceable else _shared_place(inputs, cache)
        if cache is None or place is None:
            return model(inputs, cache=cache, **kwargs)
        if self._wait > 0:
            self._wait -= 1
            return model(inputs, cache=cache)
        try:
            logits, states = self._step(inputs, [_arrays(c) for c in cache], *map(mx.array, place))
        except Exception:
            # Nothing is computed yet, so the trace has failed; what is wrong with the call itself is wrong again.
            self._traceable = False
            return model(inputs, cache=cache)
        for c, state in zip(cache, states):
            if isinstance(c, SnapKVCache):
                c.take_step(state["keys"], state["values"])
            else:
                c.cache = state["cache"]
            if isinstance(c, Recorder) and "observed" in state:
                c.record(state["observed"], c.scale, c.sinks)
        return logits


def _shared_place(inputs: mx.array, cache: list | None) -> tuple[int, int] | None:
    """The row that a step overwrites and its position, the same for every layer; None for any other call."""
    if inputs.ndim != 2 or inputs.shape[1] != 1 or not all(map(_is_traceable, cache or [None])):
        return None
    compressed = (c for c in cache or [] if isinstance(c, SnapKVCache))
    places = {(c.next_row, c.offset) for c in compressed}
    row, offset = places.pop() if len(places) == 1 else (None, 0)
    return None if row is None else (row, offset)


def _is_traceable(cache) -> bool:
    if type(cache) is ArraysCache:
        arrays = all(x is not None for x in cache.cache)
        return arrays and cache.lengths is None and cache.left_padding is None
    if type(cache) is ReselectingSnapKVCache:
        return not cache.policy.observes or cache.n_queries > 0
    return type(cache) is SnapKVCache


def _arrays(cache) -> dict[str, Any]:
    if not isinstance(cache, SnapKVCache):
        return {"cache": list(cache.cache)}
    arrays = {"keys": cache.keys, "values": cache.values}
    if isinstance(cache, ReselectingSnapKVCache) and cache.policy.observes:
        arrays["observed"] = cache.queries[:, :, -1:]
    return arrays


def _step_of(model):
    """A function of arrays to be traced: a token `(B, 1)` and the caches' arrays to logits and new arrays."""

    def step(token: mx.array, states: list[dict[str, Any]], row: mx.array, offset: mx.array):
        cache = [_traced_cache(state, row, offset) for state in states]
        logits = model(token, cache=cache)
        return logits, [{name: getattr(c, name) for name in s} for c, s in zip(cache, states)]

    return step


def _traced_cache(state: dict[str, Any], row: mx.array, offset: mx.array):
    if "keys" in state:
        kind = _TracedRecorder if "observed" in state else _TracedRows
        return kind(state["keys"], state["values"], row, offset)
    cache = ArraysCache(len(state["cache"]))
    cache.cache = list(state["cache"])
    return cache


class _TracedRows:
    """The `SnapKVCache` of a step being traced; what a model asks of it beyond this ends the trace.

    Args:
        keys, values: `(B, n_kv_heads, n_keep, head_dim)`.
        row, offset: the row to overwrite and the token's position, int32 scalars.
    """

    def __init__(self, keys: mx.array, values: mx.array, row: mx.array, offset: mx.array):
        self.keys = keys
        self.values = values
        self.offset = offset
        self._row = row.reshape(1)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.keys = mx.slice_update(self.keys, keys, self._row, (2,))
        self.values = mx.slice_update(self.values, values, self._row, (2,))
        self.offset = self.offset + 1
        return self.keys, self.values

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None):
        if N != 1 or window_size is not None:
            raise ValueError("only the mask of one token in a full-attention layer can be traced")


class _TracedRecorder(_TracedRows, Recorder):  # type: ignore[misc]  # an offset that is an array
    """The same, keeping the queries `(B, n_heads, 1, head_dim)` of the token in `observed`."""

    def record(self, queries: mx.array, scale: float, sinks: mx.array | None = None) -> None:
        self.observed = queries
