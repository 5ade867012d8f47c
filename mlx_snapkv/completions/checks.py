"""Checks of a field's value: the sentence goes on from the field's name."""

from collections.abc import Callable
from typing import Any

from pydantic import AfterValidator, ValidationInfo

MAX_VALUE_LENGTH = 60  # characters of a value that is refused


def require(ok: bool, rule: str, value: Any) -> None:
    """Raise ValueError unless ok: the rule goes on from the field's name."""
    if not ok:
        raise ValueError(f"{rule}, got {short(value)}")


def must(holds: Callable[[Any], bool], rule: str) -> AfterValidator:
    """A rule for a field; see `require`."""

    def validate(value: Any) -> Any:
        require(holds(value), rule, value)
        return value

    return AfterValidator(validate)


def needed_by(kind: str) -> AfterValidator:
    """A rule for a field after a type: what is of this type has it."""

    def validate(value: Any, info: ValidationInfo) -> Any:
        if value is None and info.data.get("type") == kind:
            raise ValueError("is missing")
        return value

    return AfterValidator(validate)


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_VALUE_LENGTH else f"{text[:MAX_VALUE_LENGTH]}…"
