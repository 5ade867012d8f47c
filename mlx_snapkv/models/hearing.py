"""What is known of an attention module's call while it is under way, and what of it is listened to.

Each thread has the call that it is in, if a recording cache was handed to that. What is wrapped here does what it did,
and tells that call.
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

from . import latents
from .family import AttentionFamily


@dataclass
class Call:
    """A call of an attention module that was handed a recording cache.

    Attributes:
        recorder: that cache.
        arguments: of the call, by place.
        heard: what its RoPE gave, or the parts of its splits, in order.
    """

    recorder: Any
    attention: Any
    family: AttentionFamily
    arguments: tuple
    heard: list[Any] = field(default_factory=list)

    def tell(
        self, queries: mx.array, keys: Any, values: Any, scale: float, sinks: Any
    ) -> tuple[Any, Any]:
        """Leave the queries of the attention function's call with the recorder; the entries to attend to."""
        read = None
        if self.family.latent:
            queries, read = latents.asked(
                self.attention, queries, self._positional(), absorbed=keys is values
            )
        borrowed = self.family.borrows(self.attention)
        self.recorder.record(queries, scale, sinks, read=read, borrowed=borrowed)
        if self.recorder.waits_for_readers:
            _lent()[id(keys)] = keys, self.recorder
        return self.recorder.attended(keys, values)

    def _positional(self) -> mx.array:
        """What an MLA module's queries have besides those that the attention function is given."""
        first = self.heard[0]
        positional = first[1] if self.family.hears == "split" else first
        return (
            positional
            if self.family.factor is None
            else positional * self.arguments[self.family.factor]
        )

    def finish(self) -> None:
        """Tell the queries of a module that computes its scores itself."""
        if not self.family.attends:
            scale = self.family.scale_of(self.attention, self.heard[0].shape[3])
            self.recorder.record(self.heard[0], scale)


_active = threading.local()


@contextlib.contextmanager
def listening(call: Call) -> Iterator[Call]:
    """Be in this call, for the block."""
    outer, _active.call = current(), call
    try:
        yield call
    finally:
        _active.call = outer


def current() -> Call | None:
    """The recording call that this thread is in."""
    return getattr(_active, "call", None)


def _lent() -> dict[int, tuple[Any, Any]]:
    """By the id of an array of keys: itself, and the recorder that gave it and waits for others to read it."""
    if not hasattr(_active, "lent"):
        _active.lent = {}
    return _active.lent


def forget() -> None:
    """Give up what was lent to readers who did not come."""
    _active.lent = {}


def told(queries: mx.array, keys: Any, values: Any, scale: float, sinks: Any) -> tuple[Any, Any]:
    """An attention function was called: whose entries it reads is told its queries; the entries to attend to."""
    call = current()
    if call is not None:
        return call.tell(queries, keys, values, scale, sinks)
    _, recorder = _lent().get(id(keys), (None, None))
    if recorder is not None:
        recorder.record(queries, scale, sinks, borrowed=True)
        if not recorder.waits_for_readers:
            del _lent()[id(keys)]
    return keys, values


def masked(queries: mx.array, keys: Any, mask: Any) -> Any:
    """What mlx-lm's attention function is to be masked by: a recording cache may `hide` some."""
    call = current()
    hide = None if call is None else getattr(call.recorder, "hide", None)
    return mask if hide is None else hide(queries, keys, mask)


class _Namespace:
    """A module in which some names are others."""

    def __init__(self, original: Any, **others: Any):
        self._original = original
        vars(self).update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def attention_of_mlx(mlx: Any) -> Any:
    """`mlx.core`, as a module sees it that calls its attention function."""

    def attend(queries, keys, values, **kwargs):
        keys, values = told(queries, keys, values, kwargs["scale"], kwargs.get("sinks"))
        return mlx.fast.scaled_dot_product_attention(queries, keys, values, **kwargs)

    return _Namespace(mlx, fast=_Namespace(mlx.fast, scaled_dot_product_attention=attend))


def splits_of_mlx(mlx: Any) -> Any:
    """`mlx.core`, as a module sees it that splits its queries."""

    def split(*args, **kwargs):
        parts = mlx.split(*args, **kwargs)
        call = current()
        if call is not None:
            call.heard.append(parts)
        return parts

    return _Namespace(mlx, split=split)


def turn_and_hear(turn):
    """A RoPE class's `__call__`, telling what it gave to the call of the module that it belongs to."""

    @functools.wraps(turn)
    def __call__(self, *args, **kwargs):
        turned = turn(self, *args, **kwargs)
        call = current()
        if call is not None and self is call.family.rope_of(call.attention):
            call.heard.append(turned)
        return turned

    return __call__


def rope_classes() -> list[type]:
    """The classes of what mlx-lm's models turn queries and keys with."""
    own = (x for x in vars(rope_utils).values() if isinstance(x, type) and issubclass(x, nn.Module))
    return list(dict.fromkeys([nn.RoPE, *(x for x in own if "__call__" in vars(x))]))
