"""A mistake in a request's body as one sentence that names the field."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from ..errors import SnapKVError
from .checks import short

Checked = TypeVar("Checked", bound=BaseModel)


def as_body(kind: type[Checked], body: Any) -> Checked:
    """A body of that kind.

    Raises: SnapKVError: it can't be answered as asked; the sentence names the field.
    """
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise SnapKVError(problem(error.errors(include_url=False)[0], body)) from None


def problem(error: Mapping[str, Any], body: Any) -> str:
    """One of pydantic's errors about a body, as a sentence that names the field."""
    place, kind, got = _place(error["loc"], body), error["type"], short(error["input"])
    if kind == "json_invalid":
        return f"the body is not JSON: {error['ctx']['error']}"
    if not isinstance(body, dict):
        return f"body must be an object, got {short(body)}"
    if kind == "value_error":
        rule = str(error["ctx"]["error"])
        return f"{place}{rule}" if rule.startswith(".") else f"{place} {rule}"
    if kind == "missing":
        return f"{place} is missing"
    if kind == "too_short":
        return f"{place} must not be empty"
    message = re.sub(" or (instance of|object to).*", "", error["msg"])
    message = message.replace("dictionary", "object")
    if message.startswith("Input "):
        return f"{place}{message.removeprefix('Input')}, got {got}"
    return f"{place}: {message}, got {got}"


def _place(loc: Sequence[str | int], body: Any) -> str:
    """Where an error is, without the names of unions' members, which pydantic has between."""
    path, at = [], body
    for i, step in enumerate(loc):
        try:
            at = at[step]
        except (LookupError, TypeError):
            if i + 1 < len(loc) or not isinstance(at, dict):
                continue
        path.append(str(step))
    return ".".join(path)
