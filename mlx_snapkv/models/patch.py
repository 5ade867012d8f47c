"""Patch attention classes so that their caches receive the queries.

The patches hook into the call of mlx-lm's `scaled_dot_product_attention`, so no forward code is copied. While a class
is patched, that function does two more things:

- If the module was called with a `Recorder` (entries/queries.py), it passes the queries to the cache, bit for bit as
  the attention uses them. For modules that pass only part of the queries, the result of the module's RoPE or of its
  first split is recorded too. A layer that borrows entries is recognised by its cache or its module.
- If the cache has an `attend` method, it calls this method to compute the attention (sparse/attending.py,
  batch/caches.py).

With any other cache, a patched class behaves like the original.
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
from .table import FAMILIES

_SDPA = "scaled_dot_product_attention"
_lock = threading.RLock()


def _record_and_attend(attention):
    """Wrap mlx-lm's attention function to record queries, and to call the cache's `attend` method if it has one."""

    @functools.wraps(attention)
    def scaled_dot_product_attention(queries, keys, values, cache, scale, mask, sinks=None):
        capture.record(queries, scale, sinks, absorbed=keys is values)
        if (attend := getattr(cache, "attend", None)) is not None:
            return attend(queries, keys, values, scale, mask, sinks)
        return attention(queries, keys, values, cache, scale, mask, sinks)

    return scaled_dot_product_attention


@functools.cache
def family_of(cls: type) -> AttentionFamily:
    """Return the family of an attention class or of its nearest known base class."""
    for base in cls.__mro__:
        name = base.__module__.removeprefix("mlx_lm.models.")
        if name in FAMILIES:
            return FAMILIES[name]
    return AttentionFamily(cls.__module__, cls.__name__)


def _recorder_among(values: Iterable[Any]) -> Any:
    """Return the recording cache among a call's arguments, or None. It may be inside a `CacheList`."""
    for value in values:
        for cache in getattr(value, "caches", (value,)):
            if hasattr(cache, "record"):
                return cache
    return None


def _call_and_record(call):
    """Wrap an attention class's `__call__` to record queries if the module reads a recording cache's entries."""

    @functools.wraps(call)
    def __call__(self, *args, **kwargs):
        given = _recorder_among((*args, *kwargs.values()))
        # A borrowing layer may receive the entries as arrays, without a cache.
        recorder = capture.lender_to(self) if given is None else given
        if recorder is None:
            return call(self, *args, **kwargs)
        family = family_of(type(self))  # type: ignore[arg-type]
        current = Call(
            recorder=recorder,
            attention=self,
            family=family,
            arguments=args,
            borrowed=given is None or family.is_borrower(self),
        )
        with capture.capturing(current):
            return call(self, *args, **kwargs)

    return __call__


@dataclass
class _Replacement:
    """A wrapped attribute, restored when the last of its `holders` leaves `_wrapped`."""

    original: Any
    wrapped: Any
    holders: int = 0


# (owner, attribute name) -> replacement
_replacements: dict[tuple[Any, str], _Replacement] = {}
_pinned: dict[type, contextlib.ExitStack] = {}  # class -> its patch_for_snapkv patch


def _targets(cls: type) -> list[tuple]:
    """Return the attributes to wrap for an attention class, as arguments for `_wrapped`."""
    family = family_of(cls)
    owner = next(c for c in cls.__mro__ if family.method in vars(c))
    # Other code may have wrapped the method. The innermost function is mlx-lm's own.
    module = sys.modules[inspect.unwrap(vars(owner)[family.method]).__module__]
    targets: list[tuple] = [(owner, family.method, _call_and_record)]
    if family.attention_function == _SDPA:
        if _SDPA not in vars(module):
            raise UnsupportedModelError(f"{cls.__name__} does not call mlx-lm's {_SDPA}")
        targets.append((module, _SDPA, _record_and_attend))
    if family.attention_function == "mx.fast":
        targets.append((module, "mx", capture.mlx_with_recording_attention))
    if family.extra_capture == "split":
        targets.append((module, "mx", capture.mlx_with_captured_splits))
    if family.extra_capture == "rope":
        targets += [
            (rope, "__call__", capture.capture_rope_results) for rope in capture.rope_classes()
        ]
    return targets


@contextlib.contextmanager
def _wrapped(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Wrap an attribute inside the `with` block. Nested and concurrent blocks share one wrapper."""
    key = owner, name
    with _lock:
        if key not in _replacements:
            original = vars(owner)[name]
            wrapped = wrap(original)
            setattr(owner, name, wrapped)
            _replacements[key] = _Replacement(original=original, wrapped=wrapped)
        replacement = _replacements[key]
        replacement.holders += 1
    try:
        yield
    finally:
        with _lock:
            replacement.holders -= 1
            if replacement.holders == 0:
                del _replacements[key]
                # If other code has wrapped our wrapper in turn, leave both: ours does nothing without our caches.
                if vars(owner)[name] is replacement.wrapped:
                    setattr(owner, name, replacement.original)


@contextlib.contextmanager
def recording(classes: Iterable[type]) -> Iterator[None]:
    """Patch attention classes inside the `with` block and restore them afterwards. Blocks can be nested."""
    with contextlib.ExitStack() as stack:
        stack.callback(capture.forget_lenders)
        for cls in classes:
            for target in _targets(cls):
                stack.enter_context(_wrapped(*target))
        yield


def _classes_to_patch(model) -> list[type]:
    """Return a model's attention classes, or those of all supported families if `model` is None."""
    if model is None:
        return [family.attention_class() for family in FAMILIES.values()]
    return attention_classes(model)


def patch_for_snapkv(model=None) -> None:
    """Patch a model's attention classes, or those of all supported families, for use with recording caches.

    `generate_step` and `prefill` patch the classes themselves, so this function is only needed to use recording caches
    without them. A second call has no effect. With any other cache, a patched class behaves like the original.
    """
    with _lock:
        for cls in _classes_to_patch(model):
            if cls not in _pinned:
                _pinned[cls] = contextlib.ExitStack()
                _pinned[cls].enter_context(recording([cls]))


def unpatch_snapkv(model=None) -> None:
    """Undo `patch_for_snapkv`. Classes that are not patched are left alone."""
    with _lock:
        for cls in _classes_to_patch(model):
            patch = _pinned.pop(cls, None)
            if patch is not None:
                patch.close()
