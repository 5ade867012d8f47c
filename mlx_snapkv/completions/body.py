"""What OpenAI's two completion endpoints take, checked: any mistake is one sentence."""

from __future__ import annotations

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
    field_validator,
)

from ..errors import SnapKVError

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

TEXT = {"type": "text"}
SHOWN = 60  # characters of a value that is refused


def require(ok: bool, rule: str, value: Any) -> None:
    """Raise ValueError unless ok, with the rule, which goes on from the field's name, and the value got."""
    if not ok:
        raise ValueError(f"{rule}, got {_shown(value)}")


def must(holds: Callable[[Any], bool], rule: str) -> AfterValidator:
    """A rule for a field; see `require`."""

    def validate(value: Any) -> Any:
        require(holds(value), rule, value)
        return value

    return AfterValidator(validate)


Probability = Annotated[float, Field(ge=0, le=1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
TokenId = Annotated[str, Field(pattern="^[0-9]{1,18}$")]  # the name of a JSON object's value
Texts = Annotated[list[str], BeforeValidator(lambda v: [v] if isinstance(v, str) else v)]
PlainText = Annotated[
    Any, must((None, TEXT).__contains__, "must be text: no form can be forced on an answer")
]
Unsupported = Annotated[Any, must(lambda value: not value, "is not supported: drop the field")]


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
    stop: Texts | None = None
    logit_bias: dict[TokenId, Finite] | None = None
    frequency_penalty: Finite | None = None
    frequency_context_size: Positive | None = None
    presence_penalty: Finite | None = None
    presence_context_size: Positive | None = None
    repetition_penalty: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    repetition_context_size: Positive | None = None
    stream: bool | None = None

    @property
    def ignored(self) -> list[str]:
        """The fields that are not known here."""
        return sorted(name for name, value in (self.model_extra or {}).items() if value is not None)


def _is_text(part: Any) -> bool:
    is_part = isinstance(part, dict) and part.get("type") == "text"
    return is_part and isinstance(part.get("text"), str)


class Message(BaseModel):
    """A message as the chat template gets it; its content is text, or parts that are."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Any, Field(validate_default=True)] = None

    @field_validator("content")
    @classmethod
    def _text(cls, value: Any, info: ValidationInfo) -> Any:
        empty = value in (None, []) and info.data.get("role") != "assistant"
        require(not empty, "must not be empty", value)
        ok = isinstance(value or "", str) or (isinstance(value, list) and all(map(_is_text, value)))
        require(ok, "must be text, or a list of parts of the type text", value)
        return value


class ChatBody(Body):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Annotated[
        Any,
        must((None, "auto", "none").__contains__, "must be auto or none: no tool can be forced"),
    ] = None
    response_format: PlainText = None
    chat_template_kwargs: dict[str, Any] | None = None
    functions: Unsupported = None
    audio: Unsupported = None
    modalities: list[Literal["text"]] | None = None

    def template_messages(self) -> list[dict[str, Any]]:
        """The messages as plain dicts of their own, with the fields that were given.

        A developer's is a system message, as templates call it.
        """
        dumped = [message.model_dump(exclude_unset=True) for message in self.messages]
        return [m | {"role": "system"} if m["role"] == "developer" else m for m in dumped]


def _is_prompt(value: Any) -> bool:
    is_list = isinstance(value, list) and value != []
    return isinstance(value, str) or (is_list and all(type(token) is int for token in value))


class CompletionBody(Body):
    """The body of `/v1/completions`."""

    prompt: Annotated[Any, must(_is_prompt, "must be one text, or the list of its token ids")]
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    suffix: Unsupported = None


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
    """What came as JSON for a url of `BODIES`, checked.

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


def problem(error: Mapping[str, Any], body: Any) -> str:
    """One of pydantic's errors about a body, as a sentence that names the field."""
    place, kind, got = _place(error["loc"], body), error["type"], error["input"]
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
    if kind.startswith("union_tag"):
        name = error["ctx"]["discriminator"].strip("'")
        if not isinstance(got, dict):
            return f"{place} must be an object, got {_shown(got)}"
        if name not in got:
            return f"{place}.{name} is missing"
        known = error["ctx"]["expected_tags"].replace("'", "").replace(", ", " or ")
        return f"{place} can't be read: its {name} must be {known}, got {_shown(got[name])}"
    message = error["msg"].partition(" or instance of")[0].replace("dictionary", "object")
    if message.startswith("Input "):
        return f"{place}{message.removeprefix('Input')}, got {_shown(got)}"
    return f"{place}: {message}, got {_shown(got)}"


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
