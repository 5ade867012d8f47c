"""Which attention modules a model has, and what is special about their families."""

from dataclasses import dataclass, field
from typing import Any

from ..errors import UnsupportedModelError
from .family import AttentionFamily
from .table import REFUSED, SUPPORTED


@dataclass
class Found:
    """A layer that owns a cache: its attention module, or None to leave it alone."""

    attention: Any
    family: AttentionFamily
    borrowers: list[Any] = field(default_factory=list)  # other attention modules read its entries


def attention_classes(model) -> list[type]:
    """The classes of a model's attention modules, each once; UnsupportedModelError as `attentions`."""
    readers = (x for found in attentions(model) for x in (found.attention, *found.borrowers))
    return list(dict.fromkeys(type(x) for x in readers if x is not None))


def attentions(model) -> list[Found]:
    """The layers that own a cache, in order.

    Raises: UnsupportedModelError: the model type is not one that can be compressed.
    """
    name = type_of(model)
    if name not in SUPPORTED:
        raise _refused(name, REFUSED.get(name, "this version does not know it"))
    found: list[Found] = []
    for layer in model.layers:
        for family in SUPPORTED[name]:
            for attention in family.attentions_of(layer):
                if family.borrows(attention):  # from the last layer of its kind
                    kind = family.kind(attention)
                    owner = next(x for x in reversed(found) if family.kind(x.attention) == kind)
                    owner.borrowers.append(attention)
                else:
                    found.append(Found(attention, family, [attention] * family.again))
    if not found:
        # A wrapper around a type that is refused.
        inner = {type_of(m) for m in model.layers[0].modules()}
        reason = next(
            (REFUSED[n] for n in inner if n in REFUSED), "its layers are unknown to this version"
        )
        raise _refused(name, reason)
    by_family: dict[AttentionFamily, list[Any]] = {}
    for each in found:
        by_family.setdefault(each.family, []).extend([each.attention, *each.borrowers])
    for family, readers in by_family.items():
        if problem := family.refusal and family.refusal(readers):
            raise _refused(name, problem)
    return found


def _refused(name: str, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"model type {name!r} can't be compressed: {reason} (mlx-snapkv models lists all types)"
    )


def type_of(module) -> str:
    """The name of the file in mlx-lm that a module comes from; several `model_type`s may share one."""
    return type(module).__module__.removeprefix("mlx_lm.models.")
