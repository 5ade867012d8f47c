"""Find a model's attention modules and their families."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ..errors import UnsupportedModelError
from .family import AttentionFamily
from .table import REFUSED, SUPPORTED


@dataclass
class CacheOwner:
    """An attention layer with its own cache.

    Attributes:
        attention: the layer's attention module, or None if the layer's cache is never compressed.
        family: description of the attention class.
        borrowers: attention modules that read this layer's entries. They belong to later layers or, in a looped model,
            to later passes.
    """

    attention: Any
    family: AttentionFamily
    borrowers: list[Any] = field(default_factory=list)


def attention_classes(model) -> list[type]:
    """Return the distinct classes of a model's attention modules.

    Raises: UnsupportedModelError: the model can't be compressed.
    """
    modules = [
        module for owner in cache_owners(model) for module in (owner.attention, *owner.borrowers)
    ]
    return list(dict.fromkeys(type(module) for module in modules if module is not None))


def cache_owners(model) -> list[CacheOwner]:
    """Return the model's attention layers that have their own cache, in order.

    Raises: UnsupportedModelError: the model can't be compressed.
    """
    model_type = type_of(model)
    if model_type not in SUPPORTED:
        reason = REFUSED.get(model_type, "this version does not know it")
        raise _refusal_error(model_type, reason)
    owners = _owners_in_families(model, SUPPORTED[model_type])
    why_refused = _why_refused(owners) if owners else _why_layers_are_unknown(model)
    if why_refused:
        raise _refusal_error(model_type, why_refused)
    return owners


def _owners_in_families(model, families: Iterable[AttentionFamily]) -> list[CacheOwner]:
    """Return the attention layers that belong to one of the `families` and have their own cache, in order."""
    owners: list[CacheOwner] = []
    for layer in model.layers:
        for family in families:
            for attention in family.attentions_of(layer):
                if family.is_borrower(attention):
                    _lender(owners, family, attention).borrowers.append(attention)
                else:
                    later_passes = [attention] * family.extra_passes
                    owners.append(CacheOwner(attention, family, borrowers=later_passes))
    return owners


def _lender(owners: list[CacheOwner], family: AttentionFamily, borrower: Any) -> CacheOwner:
    """Return the layer whose entries a borrower reads: the last of `owners` with the same `lender_key`."""
    key = family.lender_key(borrower)
    return next(owner for owner in reversed(owners) if family.lender_key(owner.attention) == key)


def _why_refused(owners: list[CacheOwner]) -> str | None:
    """Return why a model can't be compressed, or None if it can."""
    attentions_by_family: dict[AttentionFamily, list[Any]] = {}
    for owner in owners:
        attentions = attentions_by_family.setdefault(owner.family, [])
        attentions += [owner.attention, *owner.borrowers]
    for family, attentions in attentions_by_family.items():
        reason = family.why_refused(attentions)
        if reason:
            return reason
    return None


def _why_layers_are_unknown(model) -> str:
    """Explain why no attention modules were found in a model of a supported type."""
    # The model may wrap layers of an unsupported type.
    inner_types = {type_of(module) for module in model.layers[0].modules()}
    reasons = [REFUSED[name] for name in inner_types if name in REFUSED]
    return reasons[0] if reasons else "its layers are unknown to this version"


def _refusal_error(model_type: str, reason: str) -> UnsupportedModelError:
    """Build the error for a model type that can't be compressed."""
    return UnsupportedModelError(
        f"model type {model_type!r} can't be compressed: {reason} (mlx-snapkv models lists all types)"
    )


def type_of(module) -> str:
    """Return the name of the mlx-lm file that defines a module's class. Several `model_type`s may share a file."""
    return type(module).__module__.removeprefix("mlx_lm.models.")
