"""What came with a request, checked: any mistake is one sentence and a 400."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel

from ..batch.openai_body import as_body
from ..errors import SnapKVError
from .failures import bad_request

Checked = TypeVar("Checked", bound=BaseModel)


async def json_of(request: Request) -> Any:
    """The JSON of a request's body; ApiError if it is none."""
    raw = await request.body()
    try:
        value = json.loads(raw)
        if b"\\ud" in raw.lower():  # perhaps half of a pair, which no answer could tell
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except (UnicodeDecodeError, UnicodeEncodeError):
        raise bad_request("the body is not UTF-8") from None
    except RecursionError:
        raise bad_request("the body is nested too deeply") from None
    except ValueError as error:
        raise bad_request(f"the body is not JSON: {error}") from None


def checked(kind: type[Checked], value: Any) -> Checked:
    """A body of an endpoint's kind.

    Raises:
        ApiError: it is not one; the sentence names the field.
    """
    try:
        return as_body(kind, value)
    except SnapKVError as error:
        raise bad_request(str(error)) from None
    except RecursionError:
        raise bad_request("the body is nested too deeply") from None


def documented(kind: type[BaseModel]) -> dict[str, Any]:
    """What the OpenAPI page tells of an endpoint that reads such a body."""
    schema = kind.model_json_schema(ref_template=f"#/components/schemas/{kind.__name__}.{{model}}")
    schema.pop("$defs", None)
    return {"requestBody": {"content": {"application/json": {"schema": schema}}, "required": True}}
