"""Recording the queries that the attention itself used.

A `Recorder` (entries/queries.py) is a KV cache of one request that says which positions' queries it wants. While a
family's attention class is patched, a call that is handed a recording cache leaves those queries with it; any other
call is the original one. They are taken where the family's module calls mlx-lm's `scaled_dot_product_attention`, so no
forward code is copied and they are bit-equal. Where that function is not given all of them, the result of the module's
RoPE or first split is recorded. Who reads an earlier layer's entries is known by its cache, or its very array of keys.
"""

import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ..errors import UnsupportedModelError
from . import attention_classes, capture
from .capture import Call
from .family import AttentionFamily
from .table import FAMILIES, SUPPORTED

_SDPA = "scaled_dot_product_attention"
_lock = threading.RLock()


def _attend_and_record(attend):
    @functools.wraps(attend)
    def scaled_dot_product_attention(queries, keys, values, cache, scale, mask, *args, **kwargs):
        keys, values = capture.record(queries, keys, values, scale, kwargs.get("sinks"))
        mask = capture.masked(queries, keys, mask)
        return attend(queries, keys, values, cache, scale, mask, *args, **kwargs)

    return scaled_dot_product_attention


@functools.cache
def family_of(cls: type) -> AttentionFamily:
    """The family of an attention class, or of the one it is derived from."""
    names = (base.__module__.removeprefix("mlx_lm.models.") for base in cls.__mro__)
    plain = AttentionFamily(cls.__module__, cls.__name__)
    return next((FAMILIES[name] for name in names if name in FAMILIES), plain)


def _recorder_among(values: Iterable[Any]) -> Any:
    """The recording cache handed to a call, on its own or inside a `CacheList`; None if there is none."""
    caches = (cache for value in values for cache in getattr(value, "caches", (value,)))
    return next((cache for cache in caches if hasattr(cache, "record")), None)


def _call_and_record(call):
    """An attention class's `__call__` that records if, and only if, it is handed a recording cache.

    A cache that has chosen entries by the queries recorded, and could not hand them to the attention function, asks for
    a second call. What the first one computed besides the queries is never evaluated.
    """

    @functools.wraps(call)
    def __call__(self, *args, **kwargs):
        recorder = _recorder_among((*args, *kwargs.values()))
        if recorder is None:
            return call(self, *args, **kwargs)
        with capture.capturing(Call(recorder, self, family_of(type(self)), args)):  # type: ignore[arg-type]
            result = call(self, *args, **kwargs)
        return call(self, *args, **kwargs) if recorder.asks_again() else result

    return __call__


@dataclass
class _Replacement:
    """An attribute wrapped while anyone holds it, and restored when the last holder lets go."""

    original: Any
    wrapped: Any
    holders: int = 0


_replacements: dict[tuple[Any, str], _Replacement] = {}
_pinned: dict[type, contextlib.ExitStack] = {}  # classes held by patch_for_snapkv


def _targets(cls: type) -> list[tuple]:
    """What to wrap for an attention class: its `__call__`, its module's attention function, and what it captures."""
    family = family_of(cls)
    owner = next(c for c in cls.__mro__ if family.method in vars(c))
    # Wrapped by others or not, the forward code belongs to the module of the innermost function.
    module = sys.modules[inspect.unwrap(vars(owner)[family.method]).__module__]
    targets: list[tuple] = [(owner, family.method, _call_and_record)]
    if family.attends == _SDPA:
        if _SDPA not in vars(module):
            raise UnsupportedModelError(f"{cls.__name__} does not call mlx-lm's {_SDPA}")
        targets.append((module, _SDPA, _attend_and_record))
    if family.attends == "mx.fast":
        targets.append((module, "mx", capture.attention_of_mlx))
    if family.captures == "split":
        targets.append((module, "mx", capture.splits_of_mlx))
    if family.captures == "rope":
        targets += [(rope, "__call__", capture.rope_results) for rope in capture.rope_classes()]
    return targets


@contextlib.contextmanager
def _wrapped(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Wrap an attribute, as long as anyone holds it."""
    key = owner, name
    with _lock:
        if key not in _replacements:
            original = vars(owner)[name]
            _replacements[key] = _Replacement(original, wrap(original))
            setattr(owner, name, _replacements[key].wrapped)
        held = _replacements[key]
        held.holders += 1
    try:
        yield
    finally:
        with _lock:
            held.holders -= 1
            if held.holders == 0:
                del _replacements[key]
                # If someone else has patched over ours, theirs stays; ours below it does nothing by itself.
                if vars(owner)[name] is held.wrapped:
                    setattr(owner, name, held.original)


@contextlib.contextmanager
def recording(classes: Iterable[type]) -> Iterator[None]:
    """Patch the attention classes for the block; nests, and restores them whatever happens inside."""
    with contextlib.ExitStack() as stack:
        stack.callback(capture.forget)
        for cls in classes:
            for target in _targets(cls):
                stack.enter_context(_wrapped(*target))
        yield


def _classes_to_patch(model) -> list[type]:
    """The attention classes of a model's full-attention layers, or of every supported family."""
    if model is None:
        families = dict.fromkeys(family for found in SUPPORTED.values() for family in found)
        return [family.attention_class() for family in families]
    return attention_classes(model)


def patch_for_snapkv(model=None) -> None:
    """Patch a model's attention class (or every supported one) so that recording caches get its queries.

    `generate_step` and `prefill` do this by themselves for as long as they need it; call it to drive recording caches
    on your own. Patching twice is patching once; other caches get what the original computes.
    """
    with _lock:
        for cls in _classes_to_patch(model):
            if cls not in _pinned:
                _pinned[cls] = contextlib.ExitStack()
                _pinned[cls].enter_context(recording([cls]))


def unpatch_snapkv(model=None) -> None:
    """Undo `patch_for_snapkv`; a class that is not patched is left alone."""
    with _lock:
        for cls in _classes_to_patch(model):
            _pinned.pop(cls, contextlib.ExitStack()).close()
