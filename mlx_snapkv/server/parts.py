"""Lists whose members say themselves what they are: the blocks of a content, the items of an input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from ..batch.openai_body import as_body, require
from ..errors import SnapKVError


def parts(
    name: str, value: Any, kinds: Mapping[str, type[BaseModel]], default: str | None = None
) -> list[Any]:
    """The members of a list, each of the kind that its `type` names.

    Args:
        name: the list's, for sentences.
        default: the kind of members without a `type`.

    Raises:
        ValueError: it is no list, or a member is of no such kind; the sentence says which.
    """
    require(isinstance(value, list), f"{name} must be text or a list", value)
    return [_part(f"{name}.{i}", part, kinds, default) for i, part in enumerate(value)]


def _part(name: str, part: Any, kinds: Mapping[str, type[BaseModel]], default: str | None) -> Any:
    require(isinstance(part, dict), f"{name} must be an object", part)
    kind = part.get("type", default)
    known = kinds.get(kind) if isinstance(kind, str) else None
    told = f"{name} can't be read: its type must be {' or '.join(kinds)}"
    require(known is not None, told, kind)
    assert known is not None
    try:
        return as_body(known, part)
    except SnapKVError as error:
        raise ValueError(f"{name}: {error}") from None
