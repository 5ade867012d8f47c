"""Validate the requested answer format: text, any JSON object, or JSON that follows a schema."""

from typing import Any, Literal

from pydantic import Field, model_validator

from .fields import BodyModel

Schema = dict[str, Any] | bool
ANY_OBJECT: Schema = {"type": "object"}


class JsonSchema(BodyModel):
    """OpenAI's `json_schema`. Only `schema` is used. By default, it allows any object."""

    schema_: Schema = Field(ANY_OBJECT, alias="schema")


class ResponseFormat(BodyModel):
    """The format that the client requests for an answer.

    The Chat Completions API nests the schema in `json_schema`. The Responses API, Anthropic's Messages API and other
    servers put the schema in `schema`.
    """

    type: Literal["text", "json_object", "json_schema"]
    schema_: Schema | None = Field(None, alias="schema")
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> "ResponseFormat":
        """Check that a format of type "json_schema" has a schema.

        Raises: ValueError: it has none.
        """
        if self.type == "json_schema" and self.json_schema is None and self.schema_ is None:
            raise ValueError("needs a schema")
        return self

    @property
    def schema_to_enforce(self) -> Schema | None:
        """Return the schema that the answer must follow, or None for text."""
        if self.type == "text":
            return None
        if self.type == "json_schema" and self.json_schema is not None:
            return self.json_schema.schema_
        return ANY_OBJECT if self.schema_ is None else self.schema_
