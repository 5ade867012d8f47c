"""What OpenAI's two completion endpoints take, checked: any mistake is one sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from ..errors import SnapKVError

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

SHOWN = 60  # characters of a value that is refused


def _drop(value: Any, info: ValidationInfo) -> Any:
    require(not value, f"{info.field_name} is not supported: drop the field", value)
    return value


Probability = Annotated[float, Field(ge=0, le=1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Unsupported = Annotated[Any, AfterValidator(_drop)]


class Body(BaseModel):
    """The fields that both endpoints have; what is None was not given.

    Fields without a place here are ignored, and `ignored` names them. Those that would change what the answer is, and
    can't be honoured, are mistakes.
    """

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    model: str | None = None
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Probability | None = None
    top_k: Count | None = None
    min_p: Probability | None = None
    xtc_probability: Probability | None = None
    xtc_threshold: Annotated[float, Field(ge=0, le=0.5)] | None = None
    seed: int | None = None
    stop: list[str] | None = None
    logit_bias: dict[str, Finite] | None = None
    frequency_penalty: Finite | None = None
    frequency_context_size: Positive | None = None
    presence_penalty: Finite | None = None
    presence_context_size: Positive | None = None
    repetition_penalty: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    repetition_context_size: Positive | None = None

    stream: bool | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _list_of_stops(cls, value: Any) -> Any:
        stops = [value] if isinstance(value, str) else value
        ok = stops is None or (isinstance(stops, list) and all(isinstance(s, str) for s in stops))
        require(ok, "stop must be a string or a list of strings", value)
        return [s for s in stops if s] if stops else None

    @property
    def ignored(self) -> list[str]:
        """The fields that are not known here."""
        return sorted(name for name, value in (self.model_extra or {}).items() if value is not None)


class Message(BaseModel):
    """A message as the chat template gets it; its content is text, or parts that are."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Any, Field(validate_default=True)] = None

    @field_validator("content")
    @classmethod
    def _text(cls, value: Any, info: Any) -> Any:
        empty = value in (None, []) and info.data.get("role") != "assistant"
        require(not empty, "content must not be empty", value)
        parts = value if isinstance(value, list) else [{"type": "text", "text": value or ""}]
        ok = all(
            isinstance(part, dict)
            and part.get("type") == "text"
            and isinstance(part.get("text"), str)
            for part in parts
        )
        require(ok, "content must be text, or a list of parts of the type text", value)
        return value


class ChatBody(Body):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    response_format: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    functions: Unsupported = None
    audio: Unsupported = None
    modalities: list[Literal["text"]] | None = None

    @field_validator("tool_choice", "response_format")
    @classmethod
    def _free(cls, value: Any, info: ValidationInfo) -> Any:
        if info.field_name == "tool_choice":
            ok, rule = value in (None, "auto", "none"), "auto or none: no tool can be forced"
        else:
            ok, rule = value in (None, {"type": "text"}), "text: no form can be forced on an answer"
        require(ok, f"{info.field_name} must be {rule}", value)
        return value

    def template_messages(self) -> list[dict[str, Any]]:
        """The messages as plain dicts of their own, with the fields that were given.

        A developer's is a system message, as templates call it.
        """
        dumped = [message.model_dump(exclude_unset=True) for message in self.messages]
        return [m | {"role": "system"} if m["role"] == "developer" else m for m in dumped]


class CompletionBody(Body):
    """The body of `/v1/completions`."""

    prompt: Any
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    suffix: Unsupported = None

    @field_validator("prompt")
    @classmethod
    def _one_prompt(cls, value: Any) -> Any:
        tokens = value if isinstance(value, list) else [None]
        whole = all(isinstance(token, int) and not isinstance(token, bool) for token in tokens)
        ok = isinstance(value, str) or (whole and value != [])
        require(ok, "prompt must be one text, or the list of its token ids", value)
        return value


class _OneAnswer(Body):
    """What a file of requests can't ask for."""

    n: Literal[1] | None = None
    logprobs: Unsupported = None
    top_logprobs: Unsupported = None


class FileChat(ChatBody, _OneAnswer):
    """A line's body, of `/v1/chat/completions`."""


class FileCompletion(CompletionBody, _OneAnswer):
    """A line's body, of `/v1/completions`."""


BODIES: dict[str, type[Body]] = {CHAT: FileChat, COMPLETIONS: FileCompletion}
Checked = TypeVar("Checked", bound=BaseModel)


def parse(url: Any, body: Any) -> Body:
    """A checked body.

    Args:
        url: `/v1/chat/completions` or `/v1/completions`.
        body: what came as JSON.

    Raises:
        SnapKVError: it can't be answered as asked; the sentence names the field.
    """
    kind = BODIES.get(url) if isinstance(url, str) else None
    if kind is None:
        raise SnapKVError(f"url must be {' or '.join(BODIES)}, got {_shown(url)}")
    return as_body(kind, body)


def as_body(kind: type[Checked], body: Any) -> Checked:
    """A body of that kind; SnapKVError as `parse`."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise SnapKVError(problem(error.errors(include_url=False)[0], body)) from None


def require(ok: bool, sentence: str, value: Any) -> None:
    """Raise ValueError unless ok, with the sentence and the value got."""
    if not ok:
        raise ValueError(f"{sentence}, got {_shown(value)}")


def problem(error: Mapping[str, Any], body: Any) -> str:
    """One of pydantic's errors about a body, as a sentence that names the field."""
    place, kind, got = _place(error["loc"], body), error["type"], error["input"]
    if kind == "json_invalid":
        return f"the body is not JSON: {error['ctx']['error']}"
    if not isinstance(body, dict):
        return f"body must be an object, got {_shown(body)}"
    if kind == "value_error":
        outer = f"{place.rpartition('.')[0]}: " if "." in place else ""
        return outer + str(error["ctx"]["error"])
    if kind == "missing":
        return f"{place} is missing"
    if kind == "too_short":
        return f"{place} must not be empty"
    if kind.startswith("union_tag"):
        if not isinstance(got, dict):
            return f"{place} must be an object, got {_shown(got)}"
        name = error["ctx"]["discriminator"].strip("'")
        if name not in got:
            return f"{place}.{name} is missing"
        known = error["ctx"]["expected_tags"].replace("'", "").replace(", ", " or ")
        return f"{place} can't be read: its {name} must be {known}, got {_shown(got[name])}"
    message = error["msg"].replace("Input should", f"{place} should", 1)
    message = message.partition(" or instance of")[0].replace("dictionary", "object")
    shown = message if place in message else f"{place}: {message}"
    return f"{shown}, got {_shown(got)}"


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


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
