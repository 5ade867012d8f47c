"""Patch attention classes so that their caches receive the queries.

The patches hook into the call to mlx-lm's `scaled_dot_product_attention`, so no forward code is copied. While a class
is patched, that function does two more things:

- If the module was called with a `Recorder` (entries/queries.py), the recorder receives the queries, bit for bit as
  attention uses them. If the module passes only part of the queries, the result of its RoPE or first split is also
  recorded. A borrower (a module that reads an earlier layer's entries) may be called without a cache. If so, its
  queries go to that layer's recorder.
- If the cache has an `attend` method, that method computes the attention (sparse/attending.py, batch/caches.py).

With any other cache, a patched class behaves like the original.
"""

import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

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
        # An MLA module that has applied `embed_q` to its queries passes its latents as both keys and values.
        capture.record(queries, scale, sinks, absorbed=keys is values)
        attend = getattr(cache, "attend", None)
        if attend is not None:
            return attend(queries, keys, values, scale, mask, sinks)
        return attention(queries, keys, values, cache, scale, mask, sinks)

    return scaled_dot_product_attention


@functools.cache
def family_of(cls: type) -> AttentionFamily:
    """Return the family of an attention class or of its nearest known base class.

    If no class is known, return a default family.
    """
    for base_class in cls.__mro__:
        module_name = base_class.__module__.removeprefix("mlx_lm.models.")
        if module_name in FAMILIES:
            return FAMILIES[module_name]
    return AttentionFamily(cls.__module__, cls.__name__)


def _recorder_among(arguments: Iterable[Any]) -> Any:
    """Return the recording cache among a call's arguments, or None. It may be inside a `CacheList`."""
    for argument in arguments:
        for candidate in getattr(argument, "caches", (argument,)):
            if hasattr(candidate, "record"):
                return candidate
    return None


def _call_and_record(call):
    """Wrap an attention class's method to record queries if the module reads a recording cache's entries."""

    @functools.wraps(call)
    def __call__(self, *args, **kwargs):
        passed_recorder = _recorder_among((*args, *kwargs.values()))
        # A borrower may receive the entries as arrays, without a cache.
        recorder = capture.lender_to(self) if passed_recorder is None else passed_recorder
        if recorder is None:
            return call(self, *args, **kwargs)
        family = family_of(type(self))  # type: ignore[arg-type]
        captured_call = Call(
            recorder=recorder,
            attention=self,
            family=family,
            arguments=args,
            borrowed=passed_recorder is None or family.is_borrower(self),
        )
        with capture.capturing(captured_call):
            return call(self, *args, **kwargs)

    return __call__


@dataclass
class _Replacement:
    """A wrapped attribute. The original is restored once `n_users` drops to 0."""

    original: Any
    wrapper: Any
    n_users: int = 0


# (owner, attribute name) -> replacement
_replacements: dict[tuple[Any, str], _Replacement] = {}
_lasting_patches: dict[type, contextlib.ExitStack] = {}  # class -> patch_for_snapkv's patch


class _Target(NamedTuple):
    """An attribute to wrap, and the function that wraps it."""

    owner: Any
    name: str
    wrap: Callable[[Any], Any]


def _targets(cls: type) -> list[_Target]:
    """Return the attributes to wrap for an attention class.

    Raises: UnsupportedModelError: the class's module does not use mlx-lm's attention function.
    """
    family = family_of(cls)
    method_owner = next(base for base in cls.__mro__ if family.method in vars(base))
    # Other code may have wrapped the method. The innermost function is mlx-lm's own.
    original_method = inspect.unwrap(vars(method_owner)[family.method])
    module = sys.modules[original_method.__module__]
    targets = [_Target(method_owner, family.method, _call_and_record)]
    if family.attention_function == _SDPA:
        if _SDPA not in vars(module):
            raise UnsupportedModelError(f"{cls.__name__} does not call mlx-lm's {_SDPA}")
        targets.append(_Target(module, _SDPA, _record_and_attend))
    if family.attention_function == "mx.fast":
        targets.append(_Target(module, "mx", capture.mlx_with_recording_attention))
    if family.extra_capture == "split":
        targets.append(_Target(module, "mx", capture.mlx_with_captured_splits))
    if family.extra_capture == "rope":
        for rope_class in capture.rope_classes():
            targets.append(_Target(rope_class, "__call__", capture.capture_rope_results))
    return targets


@contextlib.contextmanager
def _wrapped(target: _Target) -> Iterator[None]:
    """Wrap an attribute inside the `with` block. Nested and concurrent blocks share one wrapper."""
    owner, name, wrap = target
    key = owner, name
    with _lock:
        if key not in _replacements:
            original = vars(owner)[name]
            wrapper = wrap(original)
            setattr(owner, name, wrapper)
            _replacements[key] = _Replacement(original=original, wrapper=wrapper)
        replacement = _replacements[key]
        replacement.n_users += 1
    try:
        yield
    finally:
        with _lock:
            replacement.n_users -= 1
            if replacement.n_users == 0:
                del _replacements[key]
                # Restore the original only if ours is still the outermost wrapper. If other code has wrapped ours, both
                # stay, and ours does nothing without our caches.
                is_outermost_wrapper = vars(owner)[name] is replacement.wrapper
                if is_outermost_wrapper:
                    setattr(owner, name, replacement.original)


@contextlib.contextmanager
def recording(classes: Iterable[type]) -> Iterator[None]:
    """Patch attention classes inside the `with` block and restore them afterwards. Blocks can be nested."""
    with contextlib.ExitStack() as stack:
        stack.callback(capture.forget_lenders)
        for cls in classes:
            for target in _targets(cls):
                stack.enter_context(_wrapped(target))
        yield


def _classes_to_patch(model) -> list[type]:
    """Return the attention classes of a model, or of all supported families if `model` is None."""
    if model is None:
        return [family.attention_class() for family in FAMILIES.values()]
    return attention_classes(model)


def patch_for_snapkv(model=None) -> None:
    """Patch a model's attention classes so that they can be used with recording caches.

    Call this only if you call the model yourself: `generate_step` and `prefill` patch the classes for you. If `model`
    is None, the classes of all supported families are patched. A second call for the same model has no effect. With
    mlx-lm's own caches, a patched class behaves like the original.
    """
    with _lock:
        for cls in _classes_to_patch(model):
            if cls not in _lasting_patches:
                _lasting_patches[cls] = contextlib.ExitStack()
                _lasting_patches[cls].enter_context(recording([cls]))


def unpatch_snapkv(model=None) -> None:
    """Undo `patch_for_snapkv`. Classes that are not patched are left alone."""
    with _lock:
        for cls in _classes_to_patch(model):
            patch = _lasting_patches.pop(cls, None)
            if patch is not None:
                patch.close()
