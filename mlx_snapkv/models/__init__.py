"""Find a model's attention modules and their families."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ..errors import UnsupportedModelError
from .family import AttentionFamily
from .table import REFUSED, SUPPORTED


@dataclass
class CacheOwner:
    """A layer with its own cache.

    Attributes:
        attention: the layer's attention module, or None if its cache is never compressed.
        family: description of the attention class.
        borrowers: attention modules of later layers, or of later passes of a looped model, that read this layer's
            entries.
    """

    attention: Any
    family: AttentionFamily
    borrowers: list[Any] = field(default_factory=list)


def attention_classes(model) -> list[type]:
    """Return the distinct classes of a model's attention modules.

    Raises: UnsupportedModelError: models of this type can't be compressed.
    """
    readers = (x for owner in cache_owners(model) for x in (owner.attention, *owner.borrowers))
    return list(dict.fromkeys(type(x) for x in readers if x is not None))


def cache_owners(model) -> list[CacheOwner]:
    """Return the model's layers that have their own cache, in order.

    Raises: UnsupportedModelError: models of this type can't be compressed.
    """
    name = type_of(model)
    if name not in SUPPORTED:
        raise _refused(name, REFUSED.get(name, "this version does not know it"))
    owners = _cache_owners(model, SUPPORTED[name])
    reason = _refusal(owners) if owners else _refusal_of_unknown_layers(model)
    if reason:
        raise _refused(name, reason)
    return owners


def _cache_owners(model, families: Iterable[AttentionFamily]) -> list[CacheOwner]:
    """Return the layers that have their own cache, or an empty list if no module belongs to one of the families."""
    owners: list[CacheOwner] = []
    for layer in model.layers:
        for family in families:
            for attention in family.attentions_of(layer):
                if family.is_borrower(attention):  # the lender is the last layer of the same kind
                    kind = family.lender_key(attention)
                    owner = next(
                        x for x in reversed(owners) if family.lender_key(x.attention) == kind
                    )
                    owner.borrowers.append(attention)
                else:
                    later_passes = [attention] * family.extra_passes
                    owners.append(CacheOwner(attention, family, borrowers=later_passes))
    return owners


def _refusal(owners: list[CacheOwner]) -> str | None:
    """Return the reason why a model can't be compressed, or None if it can."""
    by_family: dict[AttentionFamily, list[Any]] = {}
    for owner in owners:
        by_family.setdefault(owner.family, []).extend([owner.attention, *owner.borrowers])
    for family, readers in by_family.items():
        reason = None if family.why_refused is None else family.why_refused(readers)
        if reason:
            return reason
    return None


def _refusal_of_unknown_layers(model) -> str:
    """Return the reason why a model of a supported type has no known attention modules."""
    # The model may wrap layers of an unsupported type.
    inner = {type_of(module) for module in model.layers[0].modules()}
    reasons = [REFUSED[name] for name in inner if name in REFUSED]
    return reasons[0] if reasons else "its layers are unknown to this version"


def _refused(name: str, reason: str) -> UnsupportedModelError:
    """Build the error for a model type that can't be compressed."""
    return UnsupportedModelError(
        f"model type {name!r} can't be compressed: {reason} (mlx-snapkv models lists all types)"
    )


def type_of(module) -> str:
    """Return the name of the mlx-lm file that defines a module's class. Several `model_type`s may share a file."""
    return type(module).__module__.removeprefix("mlx_lm.models.")
