"""Validate request bodies, and describe errors of pydantic in one sentence for the client."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import AfterValidator, BaseModel, ValidationError, ValidationInfo

from ..errors import SnapKVError

MAX_VALUE_LENGTH = 60  # maximum characters of a rejected value in an error

Model = TypeVar("Model", bound=BaseModel)


def require(ok: bool, rule: str, value: Any) -> None:
    """Raise ValueError unless `ok`.

    Args:
        ok: whether the value is allowed.
        rule: rest of an error sentence that starts with the field's name, such as "must not be empty". A rule that
            starts with a dot, such as ".content must not be empty", extends this name.
        value: the value that the error quotes.
    """
    if not ok:
        raise ValueError(f"{rule}, got {shorten(value)}")


def error_sentence(place: str, rule: str) -> str:
    """Return the error sentence for a value at `place` in a body; `rule` is described in `require`."""
    return f"{place}{rule}" if rule.startswith(".") else f"{place} {rule}"


def must(is_valid: Callable[[Any], bool], rule: str) -> AfterValidator:
    """Return a validator that rejects values that are not valid; `rule` is described in `require`."""

    def validate(value: Any) -> Any:
        require(is_valid(value), rule, value)
        return value

    return AfterValidator(validate)


def required_for(kind: str) -> AfterValidator:
    """Return a validator that rejects None if the `type` of the same object is `kind`.

    The model must declare `type` before the field.
    """

    def validate(value: Any, info: ValidationInfo) -> Any:
        if value is None and info.data.get("type") == kind:
            raise ValueError("is missing")
        return value

    return AfterValidator(validate)


def shorten(value: Any) -> str:
    """Return the `repr` of a value, shorten to `MAX_VALUE_LENGTH` characters."""
    text = repr(value)
    return text if len(text) <= MAX_VALUE_LENGTH else f"{text[:MAX_VALUE_LENGTH]}…"


def validate_body(model: type[Model], body: Any) -> Model:
    """Parse a JSON value as an instance of `model`.

    Raises: SnapKVError: the body is invalid; the sentence names the field.
    """
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise SnapKVError(describe_error(first, body)) from None


def describe_error(error: Mapping[str, Any], body: Any) -> str:
    """Describe an error of pydantic about a body in a sentence that names the field."""
    place = _path(error["loc"], body)
    kind = error["type"]
    got = shorten(error["input"])
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
    # Pydantic's other sentences use terms of Python: "Input should be a valid dictionary or instance of ..."
    message = re.sub(" or (instance of|object to).*", "", error["msg"])
    message = message.replace("dictionary", "object")
    if message.startswith("Input "):
        return f"{place}{message.removeprefix('Input')}, got {got}"
    return f"{place}: {message}, got {got}"


def _path(location: Sequence[str | int], body: Any) -> str:
    """Return the location of an error as a path such as `messages.0.role`.

    Pydantic's location also contains names of union members, which are not keys of the body, and are skipped.
    """
    path = []
    value = body
    for number, step in enumerate(location, start=1):
        try:
            value = value[step]
        except (LookupError, TypeError):
            # The last step may be the name of a missing field.
            is_missing_field = number == len(location) and isinstance(value, dict)
            if not is_missing_field:
                continue
        path.append(str(step))
    return ".".join(path)
