"""Validate request bodies, and describe pydantic's errors to the client in one sentence."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import AfterValidator, BaseModel, ValidationError, ValidationInfo

from ..errors import SnapKVError

MAX_VALUE_LENGTH = 60  # maximum length of a rejected value in an error, in characters

Model = TypeVar("Model", bound=BaseModel)


def require(is_allowed: bool, rule: str, value: Any) -> None:
    """Raise ValueError unless a value is allowed.

    Args:
        is_allowed: whether the value is allowed.
        rule: the part of the error sentence after the field's name, such as "must not be empty". A rule with a leading
            dot, as in ".content must not be empty", extends the field's name.
        value: the value to quote in the error.
    """
    if not is_allowed:
        raise ValueError(f"{rule}, got {shorten(value)}")


def error_sentence(place: str, rule: str) -> str:
    """Return the error sentence for the value at `place` in a body. For `rule`, see `require`."""
    return f"{place}{rule}" if rule.startswith(".") else f"{place} {rule}"


def must(is_valid: Callable[[Any], bool], rule: str) -> AfterValidator:
    """Return a validator that rejects values for which `is_valid` is false. For `rule`, see `require`."""

    def validate(value: Any) -> Any:
        require(is_valid(value), rule, value)
        return value

    return AfterValidator(validate)


def required_for(kind: str) -> AfterValidator:
    """Return a validator that rejects None if the object's `type` is `kind`.

    The pydantic model must declare `type` before the validated field, because fields are validated in that order.
    """

    def validate(value: Any, info: ValidationInfo) -> Any:
        if value is None and info.data.get("type") == kind:
            raise ValueError("is missing")
        return value

    return AfterValidator(validate)


def shorten(value: Any) -> str:
    """Return a value's `repr`, shortened to `MAX_VALUE_LENGTH` characters."""
    text = repr(value)
    return text if len(text) <= MAX_VALUE_LENGTH else f"{text[:MAX_VALUE_LENGTH]}…"


def validate_body(model: type[Model], body: Any) -> Model:
    """Parse a JSON value as an instance of `model`.

    Raises: SnapKVError: the body is invalid. The error names the field.
    """
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first_error, *_ = error.errors(include_url=False)
        raise SnapKVError(describe_error(first_error, body)) from None


def describe_error(error: Mapping[str, Any], body: Any) -> str:
    """Describe a pydantic error for a request body, in one sentence that names the field."""
    place = _dotted_path(error["loc"], body)
    kind = error["type"]
    value = shorten(error["input"])
    if kind == "json_invalid":
        return f"the body is not JSON: {error['ctx']['error']}"
    if not isinstance(body, dict):
        return f"body must be an object, got {shorten(body)}"
    if kind == "value_error":
        return error_sentence(place, rule=str(error["ctx"]["error"]))
    if kind == "missing":
        return f"{place} is missing"
    if kind == "too_short":
        return f"{place} must not be empty"
    # Pydantic's other messages use Python's terms, such as "dictionary or instance of ...".
    message = re.sub(" or (instance of|object to).*", "", error["msg"])
    message = message.replace("dictionary", "object")
    if message.startswith("Input "):
        return f"{place}{message.removeprefix('Input')}, got {value}"
    return f"{place}: {message}, got {value}"


def _dotted_path(location: Sequence[str | int], body: Any) -> str:
    """Return an error's location as a path such as `messages.0.role`.

    Pydantic's location also contains the names of union members. They are not keys of the body, so they are skipped.
    """
    path = []
    value = body
    last_number = len(location) - 1
    for number, key_or_member in enumerate(location):
        try:
            value = value[key_or_member]
        except (LookupError, TypeError):
            # The last part of the location may be the name of a missing field.
            is_missing_field = number == last_number and isinstance(value, dict)
            if not is_missing_field:
                continue
        path.append(str(key_or_member))
    return ".".join(path)
