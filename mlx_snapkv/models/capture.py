"""Query capture: track each thread's current attention call and record its queries.

When an attention module is called with a recording cache, the call becomes the thread's current call until it returns.
The wrappers in this file behave like the functions that they wrap, and also pass the queries to the current call.

Multi-head latent attention (MLA) stores one latent and one positional key `k_pe` per token, shared by all heads. Each
head's query has a positional part `q_pe` and a part without position, `q_nope`. The head's logit is
`embed_q(q_nope) . latent + q_pe . k_pe`, so policies see `[latent, k_pe]` as the key and `[embed_q(q_nope), q_pe]` as
the query. Most mlx-lm modules pass `q_pe . k_pe` to the attention function as an additive mask, and `q_nope` as the
query (`embed_q(q_nope)` for a single token). Some pass both parts of the query as one array.
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

from ..entries.queries import CapturedQueries
from .family import AttentionFamily


@dataclass
class Call:
    """A call to an attention module whose queries are recorded.

    Attributes:
        recorder: the recording cache.
        attention: the attention module.
        family: description of the attention class.
        arguments: the call's positional arguments.
        borrowed: whether the module reads an earlier layer's entries.
        module_results: results of the module's RoPE or `split` during the call, in order.
    """

    recorder: Any
    attention: Any
    family: AttentionFamily
    arguments: tuple
    borrowed: bool = False
    module_results: list[Any] = field(default_factory=list)

    def record(self, queries: mx.array, scale: float, sinks: Any, absorbed: bool) -> None:
        """Record the queries that the module passed to the attention function.

        If later layers have yet to read the recorder's newest entries, also add the recorder to the thread's `lenders`,
        where these layers find it. Otherwise, remove it from `lenders`. For `absorbed`, see `_with_positional_part`.
        """
        captured = CapturedQueries(queries, scale, sinks, from_borrower=self.borrowed)
        if self.family.latent:
            captured = self._with_positional_part(captured, absorbed)
        self.recorder.record(captured)
        other_lenders = [lender for lender in _thread.lenders if lender is not self.recorder]
        _thread.lenders = other_lenders
        if self.recorder.waits_for_readers:
            _thread.lenders.append(self.recorder)

    def _positional_queries(self) -> mx.array:
        """Return the positional part of an MLA module's queries, from the result of its RoPE or `split`."""
        first_result = self.module_results[0]
        if self.family.extra_capture == "split":
            _, q_pe = first_result  # q_nope and q_pe
        else:
            q_pe = first_result
        if self.family.query_factor is None:
            return q_pe
        return q_pe * self.arguments[self.family.query_factor]

    def _with_positional_part(self, captured: CapturedQueries, absorbed: bool) -> CapturedQueries:
        """Return an MLA module's captured queries, `(B, n_heads, L, width)`, with their positional parts.

        The positional parts are appended unless the module has already passed them.

        Args:
            captured: queries that the module passed to the attention function.
            absorbed: whether the module has applied `embed_q` to the queries. If not, `to_key_space` of the returned
                queries applies `embed_q`.
        """
        q_pe = self._positional_queries()
        nope_size = self.attention.qk_nope_head_dim
        queries = captured.queries
        lacks_positional_part = absorbed or queries.shape[3] == nope_size
        if lacks_positional_part:
            queries = mx.concatenate([queries, q_pe], axis=-1)
        if absorbed:
            return captured._replace(queries=queries)

        def to_key_space(queries: mx.array) -> mx.array:
            nope_part, positional_part = queries[..., :nope_size], queries[..., nope_size:]
            return mx.concatenate([self.attention.embed_q(nope_part), positional_part], axis=-1)

        return captured._replace(queries=queries, to_key_space=to_key_space)


class _Thread(threading.local):
    """Per-thread state.

    Attributes:
        call: the current call, if any.
        lenders: recording caches whose newest entries have yet to be read by later layers.
    """

    def __init__(self):
        self.call: Call | None = None
        self.lenders: list[Any] = []


_thread = _Thread()


@contextlib.contextmanager
def capturing(call: Call) -> Iterator[None]:
    """Make `call` the thread's current call inside the `with` block.

    If the module computes its own attention scores, its queries are recorded when the block ends.
    """
    _thread.call = call
    try:
        yield
    finally:
        _thread.call = None
    computes_own_scores = not call.family.attention_function
    if computes_own_scores:
        queries, *_ = call.module_results
        scale = call.family.scale_of(call.attention, queries.shape[3])
        call.recorder.record(CapturedQueries(queries, scale))


def forget_lenders() -> None:
    """Forget the caches that are still waiting for later layers to read their entries."""
    _thread.lenders = []


def lender_to(attention: Any) -> Any:
    """Return the recording cache that lends an attention module its entries, or None."""
    for lender in _thread.lenders:
        if any(attention is borrower for borrower in lender.layer.borrowers):
            return lender
    return None


def record(queries: mx.array, scale: float, sinks: Any, absorbed: bool = False) -> None:
    """Record queries if the thread has a current call."""
    if _thread.call is not None:
        _thread.call.record(queries, scale, sinks, absorbed)


class _OverridingProxy:
    """A proxy that overrides some of a module's attributes."""

    def __init__(self, original: Any, **replacements: Any):
        self._original = original
        vars(self).update(replacements)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def mlx_with_recording_attention(mlx: Any) -> Any:
    """Return a proxy for `mlx.core` whose attention function records queries.

    It is for modules that call MLX's attention function directly.
    """

    def attend(queries, keys, values, **kwargs):
        record(queries, kwargs["scale"], kwargs.get("sinks"))
        return mlx.fast.scaled_dot_product_attention(queries, keys, values, **kwargs)

    recording_fast = _OverridingProxy(mlx.fast, scaled_dot_product_attention=attend)
    return _OverridingProxy(mlx, fast=recording_fast)


def mlx_with_captured_splits(mlx: Any) -> Any:
    """Return a proxy for `mlx.core` whose `split` also passes its results to the current call."""

    def split(*args, **kwargs):
        parts = mlx.split(*args, **kwargs)
        if _thread.call is not None:
            _thread.call.module_results.append(parts)
        return parts

    return _OverridingProxy(mlx, split=split)


def capture_rope_results(rope_call):
    """Wrap a RoPE class's `__call__` to pass the result to the current call.

    The result is only passed on if the RoPE object belongs to the module that is being called.
    """

    @functools.wraps(rope_call)
    def __call__(self, *args, **kwargs):
        rotated = rope_call(self, *args, **kwargs)
        call = _thread.call
        if call is not None and self is call.family.rope_of(call.attention):
            call.module_results.append(rotated)
        return rotated

    return __call__


def rope_classes() -> list[type]:
    """Return the RoPE classes of MLX and mlx-lm."""
    classes = [value for value in vars(rope_utils).values() if isinstance(value, type)]
    rope_modules = [
        cls for cls in classes if issubclass(cls, nn.Module) and "__call__" in vars(cls)
    ]
    return list(dict.fromkeys([nn.RoPE, *rope_modules]))  # without duplicates
