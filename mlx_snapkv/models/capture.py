"""Query capture: the attention call that a thread is in, and what is recorded of it.

A call that was handed a recording cache is this thread's current one. The wrappers here compute what the originals do,
and leave with the call what its recorder needs.

Multi-head latent attention (MLA) stores one latent for all heads, and the positional part of one key. A query head's
logit is `embed_q(q_nope) . latent + q_pe . k_pe`; so a key, as policies see it, is `[latent, k_pe]`, and a query
`[embed_q(q_nope), q_pe]`. mlx-lm's modules give the attention function `q_nope`, or for a single token
`embed_q(q_nope)`, and hide `q_pe` in a mask of scores; some give both parts of the query at once.
"""

import contextlib
import functools
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import rope_utils

from ..entries.queries import Captured
from .family import AttentionFamily


@dataclass
class Call:
    """A call of an attention module that was handed a recording cache."""

    recorder: Any  # that cache
    attention: Any
    family: AttentionFamily
    arguments: tuple  # by place
    captured: list[Any] = field(default_factory=list)  # results of its RoPE, or of its splits

    def record(
        self, queries: mx.array, keys: Any, values: Any, scale: float, sinks: Any
    ) -> tuple[Any, Any]:
        """Record the queries of the attention function's call; returns the entries to attend to."""
        captured = Captured(queries, scale, sinks, borrowed=self.family.borrows(self.attention))
        if self.family.latent:
            captured = self._latent(captured, absorbed=keys is values)
        self.recorder.record(captured)
        if self.recorder.waits_for_readers:
            _thread.lent[id(keys)] = keys, self.recorder
        return self.recorder.attended(keys, values)

    def _latent(self, captured: Captured, absorbed: bool) -> Captured:
        """The whole queries of an MLA module's call, perhaps with `embed_q` absorbed."""
        positional, factor = self.captured[0], self.family.factor
        if self.family.captures == "split":
            positional = positional[1]
        if factor is not None:
            positional = positional * self.arguments[factor]
        n_plain, queries = self.attention.qk_nope_head_dim, captured.heads
        if absorbed or queries.shape[3] == n_plain:
            queries = mx.concatenate([queries, positional], axis=-1)
        if absorbed:
            return captured._replace(heads=queries)

        def read(some: mx.array) -> mx.array:
            plain, rest = some[..., :n_plain], some[..., n_plain:]
            return mx.concatenate([self.attention.embed_q(plain), rest], axis=-1)

        return captured._replace(heads=queries, read=read)


class _Thread(threading.local):
    """A thread's current call, and the entries that wait for others to read them."""

    def __init__(self):
        self.call: Call | None = None
        # By the id of an array of keys: itself, and the recorder that gave it.
        self.lent: dict[int, tuple[Any, Any]] = {}


_thread = _Thread()


@contextlib.contextmanager
def capturing(call: Call) -> Iterator[None]:
    """Make it this thread's current call, for the block; record the queries of a module that computes its scores."""
    _thread.call = call
    try:
        yield
    finally:
        _thread.call = None
    if not call.family.attends:
        queries, *_ = call.captured
        scale = call.family.scale_of(call.attention, queries.shape[3])
        call.recorder.record(Captured(queries, scale))


def forget() -> None:
    """Drop the keys that were lent to readers who did not come."""
    _thread.lent.clear()


def record(queries: mx.array, keys: Any, values: Any, scale: float, sinks: Any) -> tuple[Any, Any]:
    """Record an attention function's queries with the recorder of its entries; returns the entries to attend to."""
    if _thread.call is not None:
        return _thread.call.record(queries, keys, values, scale, sinks)
    if id(keys) in _thread.lent:
        _, recorder = _thread.lent[id(keys)]
        recorder.record(Captured(queries, scale, sinks, borrowed=True))
        if not recorder.waits_for_readers:
            del _thread.lent[id(keys)]
    return keys, values


def masked(queries: mx.array, keys: Any, mask: Any) -> Any:
    """The mask of an attention function's call: a recording cache may `hide` some entries."""
    hide = getattr(_thread.call and _thread.call.recorder, "hide", None)
    return mask if hide is None else hide(queries, keys, mask)


class _Namespace:
    """A module in which some names are others."""

    def __init__(self, original: Any, **others: Any):
        self._original = original
        vars(self).update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def attention_of_mlx(mlx: Any) -> Any:
    """`mlx.core` for a module that calls its attention function."""

    def attend(queries, keys, values, **kwargs):
        keys, values = record(queries, keys, values, kwargs["scale"], kwargs.get("sinks"))
        return mlx.fast.scaled_dot_product_attention(queries, keys, values, **kwargs)

    return _Namespace(mlx, fast=_Namespace(mlx.fast, scaled_dot_product_attention=attend))


def splits_of_mlx(mlx: Any) -> Any:
    """`mlx.core` for a module that splits its queries."""

    def split(*args, **kwargs):
        parts = mlx.split(*args, **kwargs)
        if _thread.call is not None:
            _thread.call.captured.append(parts)
        return parts

    return _Namespace(mlx, split=split)


def rope_results(rope_call):
    """A RoPE class's `__call__`, which leaves its result with the call of the module that it belongs to."""

    @functools.wraps(rope_call)
    def __call__(self, *args, **kwargs):
        turned = rope_call(self, *args, **kwargs)
        call = _thread.call
        if call is not None and self is call.family.rope_of(call.attention):
            call.captured.append(turned)
        return turned

    return __call__


def rope_classes() -> list[type]:
    """The RoPE classes of mlx-lm's models."""
    own = (x for x in vars(rope_utils).values() if isinstance(x, type) and issubclass(x, nn.Module))
    return list(dict.fromkeys([nn.RoPE, *(x for x in own if "__call__" in vars(x))]))
