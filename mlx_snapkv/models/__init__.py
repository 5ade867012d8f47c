"""Which attention modules a model has, and what is special about their families."""

from typing import Any

from ..errors import UnsupportedModelError
from .family import AttentionFamily
from .table import REFUSED, SUPPORTED


def attention_classes(model) -> list[type]:
    """The classes of a model's attention modules, each once.

    Raises:
        UnsupportedModelError: the model type is not one that can be compressed.
    """
    found = (attention for attention, _ in attentions(model) if attention is not None)
    return list(dict.fromkeys(map(type, found)))


def attentions(model) -> list[tuple[Any, AttentionFamily]]:
    """The attention modules of the layers that own a cache, in order; None for a layer to leave alone."""
    name = type_of(model)
    if name in REFUSED:
        raise _refused(name, REFUSED[name])
    if name not in SUPPORTED:
        raise _refused(name, "this version does not know it")
    found = []
    for layer in model.layers:
        for family in SUPPORTED[name]:
            attention = family.attention_of(layer)
            if family.idle and family.idle(layer):
                found.append((None, family))
            elif attention is not None:
                found.append((attention, family))
    if not found:
        # A wrapper around a type that is refused.
        inner = {type_of(m) for m in model.layers[0].modules()}
        reason = next((REFUSED[n] for n in inner if n in REFUSED), "its layers are not known")
        raise _refused(name, reason)
    for family in {family for _, family in found}:
        problem = family.refusal and family.refusal([a for a, f in found if f is family])
        if problem:
            raise _refused(name, problem)
    return found


def _refused(name: str, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"model type {name!r} can't be compressed: {reason} (mlx-snapkv models lists all types)"
    )


def type_of(module) -> str:
    """The name of the file in mlx-lm that a module comes from; several `model_type`s may share one."""
    return type(module).__module__.removeprefix("mlx_lm.models.")
