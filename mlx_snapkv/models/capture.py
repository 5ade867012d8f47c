"""Query capture: track each thread's current attention call and record its queries.

A call of an attention module with a recording cache becomes its thread's current call until it returns. The wrappers in
this file behave like the functions that they wrap, and also pass the queries to the current call.

Multi-head latent attention (MLA) stores one latent per token, shared by all heads, and one positional key. The logit of
a query head is `embed_q(q_nope) . latent + q_pe . k_pe`, so policies see `[latent, k_pe]` as the key and
`[embed_q(q_nope), q_pe]` as the query. Most mlx-lm modules pass the attention function `q_nope`, or `embed_q(q_nope)`
for a single token, and fold `q_pe` into an additive mask. Some pass both parts of the query as one array.
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
    """A call of an attention module whose queries are recorded.

    Attributes:
        recorder: the recording cache.
        attention: the attention module.
        family: description of the attention class.
        arguments: the call's positional arguments.
        borrowed: whether the module reads an earlier layer's entries.
        captured: results of the module's RoPE or `split` during the call, in order.
    """

    recorder: Any
    attention: Any
    family: AttentionFamily
    arguments: tuple
    borrowed: bool = False
    captured: list[Any] = field(default_factory=list)

    def record(self, queries: mx.array, scale: float, sinks: Any, absorbed: bool) -> None:
        """Record the queries that the module passed to the attention function.

        If later layers still have to read the same entries, register the recorder as a lender. For `absorbed`, see
        `_latent`.
        """
        captured = Captured(queries, scale, sinks, borrowed=self.borrowed)
        if self.family.latent:
            captured = self._latent(captured, absorbed)
        self.recorder.record(captured)
        lenders = [lender for lender in _thread.lenders if lender is not self.recorder]
        if self.recorder.waits_for_readers:
            lenders.append(self.recorder)
        _thread.lenders = lenders

    def _latent(self, captured: Captured, absorbed: bool) -> Captured:
        """Return an MLA module's queries with their positional part, `(B, n_heads, L, width)`.

        Args:
            captured: queries that the module passed to the attention function.
            absorbed: whether the module has applied `embed_q` to the queries. If not, the result's `read` applies it.
        """
        positional = self.captured[0]
        if self.family.captures == "split":
            _, positional = positional  # q_nope and q_pe
        if self.family.factor is not None:
            positional = positional * self.arguments[self.family.factor]
        n_plain = self.attention.qk_nope_head_dim
        queries = captured.queries
        if absorbed or queries.shape[3] == n_plain:  # otherwise already included
            queries = mx.concatenate([queries, positional], axis=-1)
        if absorbed:
            return captured._replace(queries=queries)

        def read(heads: mx.array) -> mx.array:
            plain, positional = heads[..., :n_plain], heads[..., n_plain:]
            return mx.concatenate([self.attention.embed_q(plain), positional], axis=-1)

        return captured._replace(queries=queries, read=read)


class _Thread(threading.local):
    """State of one thread.

    Attributes:
        call: the current call, if any.
        lenders: recording caches whose newest entries later layers have yet to read.
    """

    def __init__(self):
        self.call: Call | None = None
        self.lenders: list[Any] = []


_thread = _Thread()


@contextlib.contextmanager
def capturing(call: Call) -> Iterator[None]:
    """Make `call` the thread's current call inside the `with` block.

    The queries of a module that computes its own attention scores are recorded when the block ends.
    """
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
    """Forget the caches that are still waiting for later layers to read their entries."""
    _thread.lenders = []


def lender_to(attention: Any) -> Any:
    """Return the recording cache from which an attention module borrows its entries, or None."""
    for lender in _thread.lenders:
        if any(attention is borrower for borrower in lender.layer.borrowers):
            return lender
    return None


def record(queries: mx.array, scale: float, sinks: Any, absorbed: bool = False) -> None:
    """Record queries if a call is being captured."""
    if _thread.call is not None:
        _thread.call.record(queries, scale, sinks, absorbed)


class _Namespace:
    """Proxy for a module that overrides some of its attributes."""

    def __init__(self, original: Any, **replacements: Any):
        self._original = original
        vars(self).update(replacements)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def attention_of_mlx(mlx: Any) -> Any:
    """Return a proxy for `mlx.core` whose attention function records queries, for modules that call it directly."""

    def attend(queries, keys, values, **kwargs):
        record(queries, kwargs["scale"], kwargs.get("sinks"))
        return mlx.fast.scaled_dot_product_attention(queries, keys, values, **kwargs)

    return _Namespace(mlx, fast=_Namespace(mlx.fast, scaled_dot_product_attention=attend))


def splits_of_mlx(mlx: Any) -> Any:
    """Return a proxy for `mlx.core` whose `split` also passes its results to the current call."""

    def split(*args, **kwargs):
        parts = mlx.split(*args, **kwargs)
        if _thread.call is not None:
            _thread.call.captured.append(parts)
        return parts

    return _Namespace(mlx, split=split)


def rope_results(rope_call):
    """Wrap a RoPE class's `__call__` to pass its result to the current call if that call's module owns the RoPE."""

    @functools.wraps(rope_call)
    def __call__(self, *args, **kwargs):
        rotated = rope_call(self, *args, **kwargs)
        call = _thread.call
        if call is not None and self is call.family.rope_of(call.attention):
            call.captured.append(rotated)
        return rotated

    return __call__


def rope_classes() -> list[type]:
    """Return the RoPE classes of MLX and mlx-lm."""
    types = (x for x in vars(rope_utils).values() if isinstance(x, type))
    modules = (x for x in types if issubclass(x, nn.Module) and "__call__" in vars(x))
    return list(dict.fromkeys([nn.RoPE, *modules]))
