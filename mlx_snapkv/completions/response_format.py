"""The form that a request wants its answer to have."""

from typing import Any, Literal

from pydantic import Field, model_validator

from .part import Part

Schema = dict[str, Any] | bool
OBJECT = {"type": "object"}


class JsonSchema(Part):
    schema_: Schema = Field(OBJECT, alias="schema")


class ResponseFormat(Part):
    """What an answer must be: anything, an object, or JSON that obeys a schema, which other servers take here too."""

    type: Literal["text", "json_object", "json_schema"]
    schema_: Schema | None = Field(None, alias="schema")
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> "ResponseFormat":
        if self.type == "json_schema" and self.json_schema is None and self.schema_ is None:
            raise ValueError(".json_schema is missing")
        return self

    @property
    def schema_wanted(self) -> Schema | None:
        if self.type == "text":
            return None
        nested = self.json_schema if self.type == "json_schema" else None
        return nested.schema_ if nested else OBJECT if self.schema_ is None else self.schema_
