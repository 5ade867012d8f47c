"""What OpenAI's two completion endpoints take, checked: any mistake is one sentence."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
)

from ..errors import SnapKVError

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

SHOWN = 60  # characters of a value that is refused


def require(ok: bool, rule: str, value: Any) -> None:
    """Raise ValueError unless ok: the rule goes on from the field's name."""
    if not ok:
        raise ValueError(f"{rule}, got {_shown(value)}")


def must(holds: Callable[[Any], bool], rule: str) -> AfterValidator:
    """A rule for a field; see `require`."""

    def validate(value: Any) -> Any:
        require(holds(value), rule, value)
        return value

    return AfterValidator(validate)


Probability = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
NLogprobs = Annotated[int, Field(ge=0, le=20)]
TokenId = Annotated[str, Field(pattern="^[0-9]{1,18}$")]  # the name of a JSON object's value
Stops = Annotated[list[str], BeforeValidator(lambda v: [v] if isinstance(v, str) else v)]
Unsupported = Annotated[Any, must(lambda value: not value, "is not supported: drop the field")]


class Part(BaseModel):
    """A body or a part of one; unknown fields, such as `cache_control` and `citations`, are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


class Text(Part):
    type: Literal["text"]
    text: str


def as_parts(value: Any) -> Any:
    """A content as a list of parts: a text is one, nothing is none."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    return [] if value is None else value


def _spoken(value: Any, info: ValidationInfo) -> Any:
    require(bool(value) or info.data.get("role") == "assistant", "must not be empty", value)
    return value


Parts = BeforeValidator(as_parts)
Spoken = AfterValidator(_spoken)  # content, after a role: only an assistant's may be empty


def needed_by(kind: str) -> AfterValidator:
    """A rule for a field after a type: what is of this type has it."""

    def validate(value: Any, info: ValidationInfo) -> Any:
        if value is None and info.data.get("type") == kind:
            raise ValueError("is missing")
        return value

    return AfterValidator(validate)


class JsonSchema(Part):
    schema_: dict[str, Any] | bool = Field(alias="schema")


class ResponseFormat(Part):
    """What an answer must be: anything, an object, or JSON that obeys a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Annotated[JsonSchema | None, needed_by("json_schema")] = Field(
        None, validate_default=True
    )

    @property
    def schema_wanted(self) -> dict[str, Any] | bool | None:
        if self.json_schema is not None and self.type == "json_schema":
            return self.json_schema.schema_
        return {"type": "object"} if self.type == "json_object" else None


class FunctionName(Part):
    name: Annotated[str, Field(min_length=1)]


class ToolChoice(Part):
    """Whether tools may or must be called, or the one to call."""

    type: Literal["auto", "none", "required", "function"]
    function: Annotated[FunctionName | None, needed_by("function")] = Field(
        None, validate_default=True
    )


def _as_choice(value: Any) -> Any:
    return {"type": value} if isinstance(value, str) else value


class StreamOptions(Part):
    include_usage: bool = False


class CommonBody(Part):
    """The fields that both endpoints have; what is None was not given.

    Unknown fields are ignored. Those that would change what the answer is, and can't be honoured, are mistakes.
    """

    model_config = ConfigDict(extra="allow")

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
    stop: Stops | None = None
    logit_bias: dict[TokenId, float] | None = None
    frequency_penalty: float | None = None
    frequency_context_size: Positive | None = None
    presence_penalty: float | None = None
    presence_context_size: Positive | None = None
    repetition_penalty: Annotated[float, Field(ge=0)] | None = None
    repetition_context_size: Positive | None = None
    n: Annotated[int, Field(ge=1, le=8)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    full_cache: bool | None = None  # answer from all entries, whatever the policy


class Message(Part):
    """A message as the chat template gets it; its content is texts."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[Text], Parts, Spoken] = Field([], validate_default=True)


class ChatBody(CommonBody):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Annotated[ToolChoice | None, BeforeValidator(_as_choice)] = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    functions: Unsupported = None
    audio: Unsupported = None
    modalities: list[Literal["text"]] | None = None
    logprobs: bool | None = None
    top_logprobs: NLogprobs | None = None

    def template_messages(self) -> list[dict[str, Any]]:
        """The messages as plain dicts of their own, with the fields that were given.

        A developer's is a system message, as templates call it.
        """
        dumped = [message.model_dump(exclude_unset=True) for message in self.messages]
        return [m | {"role": "system"} if m["role"] == "developer" else m for m in dumped]


class CompletionBody(CommonBody):
    """The body of `/v1/completions`."""

    prompt: str | list[int]  # one text, or its token ids
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    suffix: Unsupported = None
    logprobs: NLogprobs | None = None


Body = ChatBody | CompletionBody
BODIES: dict[str, type[Body]] = {CHAT: ChatBody, COMPLETIONS: CompletionBody}
Checked = TypeVar("Checked", bound=BaseModel)


def parse(url: Any, body: Any) -> Body:
    """What a line of a file has as JSON for a url of `BODIES`, checked; it can ask for one answer.

    Raises: SnapKVError: it can't be answered as asked; the sentence names the field.
    """
    if not isinstance(url, str) or url not in BODIES:
        raise SnapKVError(f"url must be {' or '.join(BODIES)}, got {_shown(url)}")
    found = as_body(BODIES[url], body)
    servers = {"n", "logprobs", "top_logprobs", "full_cache"}
    for name, value in found.model_dump(include=servers).items():
        if value and (name, value) != ("n", 1):
            raise SnapKVError(f"{name} is not supported in a file of requests: drop the field")
    return found


def as_body(kind: type[Checked], body: Any) -> Checked:
    """A body of that kind; SnapKVError as `parse`."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise SnapKVError(problem(error.errors(include_url=False)[0], body)) from None


def problem(error: Mapping[str, Any], body: Any) -> str:
    """One of pydantic's errors about a body, as a sentence that names the field."""
    place, kind, got = _place(error["loc"], body), error["type"], _shown(error["input"])
    if kind == "json_invalid":
        return f"the body is not JSON: {error['ctx']['error']}"
    if not isinstance(body, dict):
        return f"body must be an object, got {_shown(body)}"
    if kind == "value_error":
        return f"{place} {error['ctx']['error']}"
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


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
