"""What OpenAI's two completion endpoints take, checked: any mistake is one sentence."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)

from ..errors import SnapKVError
from .checks import require, short
from .contents import as_list
from .fields import (
    AtMost,
    Bias,
    ContextSize,
    Factor,
    Integer,
    Name,
    NLogprobs,
    NoneIfEmpty,
    Number,
    Penalty,
    Probability,
    Stops,
    Temperature,
    TokenId,
    TopK,
    Unsupported,
    Whole,
)
from .messages import Message, is_answer, messages_of

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class Part(BaseModel):
    """A body or a part of one; unknown fields, such as `cache_control` and `citations`, are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


def _messages(items: Any) -> list[Message]:
    """The messages of a list of them in any form, or of a response's items; one of them has to say something."""
    require(isinstance(items, list), "should be a valid list", items)
    require(bool(items), "must not be empty", items)
    messages: list[Message] = []
    n_answered = max((i for i, item in enumerate(items) if is_answer(item)), default=0)
    for number, item in enumerate(items):
        follows_result = bool(messages) and messages[-1].role == "tool"
        may_have_media = follows_result or number < n_answered
        try:
            new = [item] if isinstance(item, Message) else messages_of(item, may_have_media)
        except ValueError as error:
            rule = str(error)
            raise ValueError(
                f".{number}{rule}" if rule.startswith(".") else f".{number} {rule}"
            ) from None
        messages += new
    says = any(
        m.text or m.reasoning or m.calls or m.role in ("assistant", "tool") for m in messages
    )
    require(says, f".{len(items) - 1}.content must not be empty", "")
    return messages


ANY_FORM = {"type": "array", "items": {"type": "object"}, "minItems": 1}
Messages = Annotated[
    list[InstanceOf[Message]], BeforeValidator(_messages), WithJsonSchema(ANY_FORM)
]


def needed_by(kind: str) -> AfterValidator:
    """A rule for a field after a type: what is of this type has it."""

    def validate(value: Any, info: ValidationInfo) -> Any:
        if value is None and info.data.get("type") == kind:
            raise ValueError("is missing")
        return value

    return AfterValidator(validate)


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


SERVICES = {  # what OpenAI's tool_choice may force besides functions
    *("file_search", "web_search", "web_search_preview", "image_generation", "code_interpreter"),
    *("computer", "computer_use", "computer_use_preview", "mcp", "shell", "apply_patch"),
}


class FunctionName(Part):
    name: Name


class ToolChoice(Part):
    """Whether tools may or must be called, or the one to call."""

    type: Literal["auto", "none", "required", "function"]
    allowed: list[str] | None = None  # the tools that may be called
    service: str | None = None  # the kind of a tool that was to be called, and is not known here
    function: Annotated[FunctionName | None, needed_by("function")] = Field(
        None, validate_default=True
    )


def _as_choice(value: Any) -> Any:
    """The tool to call is named one level higher in responses, whose custom tools are functions here."""
    if isinstance(value, str):
        return {"type": value}
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "allowed_tools":
        inner = value.get(kind, value)
        require(isinstance(inner, dict), ".allowed_tools should be a valid object", inner)
        names = [_named(tool)["name"] for tool in as_list(inner.get("tools"))]
        allowed = [name for name in names if name is not None]  # a service's may have none
        return {"type": inner.get("mode", "auto"), "allowed": allowed}
    if kind == "any":  # Anthropic's, as `tool`
        return {"type": "required"}
    if kind in ("function", "custom", "tool") and ("name" in value or kind in value):
        return {"type": "function", "function": _named(value)}
    return {"type": "auto", "service": kind} if kind in SERVICES else value


def _named(tool: Any) -> Any:
    """What has the name of a tool in a choice."""
    require(isinstance(tool, dict), " should name tools", tool)
    return {"name": tool.get("name")} | (tool.get("function") or tool.get("custom") or {})


class StreamOptions(Part):
    include_usage: bool | None = None


class CommonBody(Part):
    """The fields that both endpoints have; what is None was not given.

    Unknown fields are ignored. Those that would change what the answer is, and can't be honoured, are mistakes.
    """

    model_config = ConfigDict(extra="allow")

    @property
    def by_functions(self) -> bool:
        """Whether the client knows functions, which tools were before, and looks for calls of these."""
        return False

    model: str | None = None
    max_tokens: AtMost | None = None
    max_completion_tokens: AtMost | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: TopK | None = None
    min_p: Probability | None = None
    xtc_probability: Probability | None = None
    xtc_threshold: Annotated[Number, Field(ge=0, le=0.5)] | None = None
    seed: Integer | None = None
    stop: Stops | None = None
    logit_bias: Annotated[dict[TokenId, Bias] | None, NoneIfEmpty] = None
    frequency_penalty: Penalty | None = None
    frequency_context_size: ContextSize | None = None
    presence_penalty: Penalty | None = None
    presence_context_size: ContextSize | None = None
    repetition_penalty: Factor | None = None
    repetition_context_size: ContextSize | None = None
    n: Annotated[int, Field(ge=1, le=8), Whole] | None = None
    stream: bool | None = None
    stream_options: Annotated[StreamOptions | None, NoneIfEmpty] = None
    full_cache: bool | None = None  # answer from all entries, whatever the policy


class ChatBody(CommonBody):
    """The body of `/v1/chat/completions`."""

    messages: Messages
    tools: list[dict[str, Any]] | None = None
    tool_choice: Annotated[ToolChoice | None, BeforeValidator(_as_choice)] = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, NoneIfEmpty] = None
    functions: list[dict[str, Any]] | None = None  # tools, before they were called so
    continue_final_message: bool | None = None  # vLLM's: False begins a new turn behind it
    audio: Unsupported = None
    modalities: list[Literal["text"]] | None = None
    logprobs: bool | None = None
    top_logprobs: NLogprobs | None = None
    # How much to think: see `thinking_options`.
    reasoning_effort: Any = None
    reasoning: Any = None
    thinking: Any = None
    enable_thinking: Any = None
    think: Any = None

    @property
    def by_functions(self) -> bool:
        return bool(self.functions)

    @model_validator(mode="before")
    @classmethod
    def _functions(cls, body: Any) -> Any:
        """Functions are tools; a call of one that is forced, or forbidden, is a choice of tools."""
        if not isinstance(body, dict):
            return body
        choice, functions = body.get("function_call"), as_list(body.get("functions"))
        found = {name: value for name, value in body.items() if name != "function_call"}
        if functions and not body.get("tools"):
            found["tools"] = [{"type": "function", "function": each} for each in functions]
            named = {"type": "function", "function": choice}
            found["tool_choice"] = named if isinstance(choice, dict) else choice
        return found


def _as_number(value: Any) -> Any:
    """Log-probabilities as chats ask for them: those of the answer's own tokens."""
    return {True: 0, False: None}[value] if isinstance(value, bool) else value


class CompletionBody(CommonBody):
    """The body of `/v1/completions`."""

    prompt: str | list[int] | list[str] | list[list[int]]  # one text or several, or their token ids
    best_of: Annotated[Literal[1], Whole] | None = None
    echo: Literal[False] | None = None
    suffix: Unsupported = None
    logprobs: Annotated[NLogprobs | None, BeforeValidator(_as_number)] = None

    def each(self) -> list["CompletionBody"]:
        """A body for each text."""
        if isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int):
            return [self]
        return [self.model_copy(update={"prompt": prompt}) for prompt in self.prompt]


Body = ChatBody | CompletionBody
BODIES: dict[str, type[Body]] = {CHAT: ChatBody, COMPLETIONS: CompletionBody}
Checked = TypeVar("Checked", bound=BaseModel)


def parse(url: Any, body: Any) -> Body:
    """What a line of a file has as JSON for a url of `BODIES`, checked; it can ask for one answer.

    Raises: SnapKVError: it can't be answered as asked; the sentence names the field.
    """
    if not isinstance(url, str) or url not in BODIES:
        raise SnapKVError(f"url must be {' or '.join(BODIES)}, got {short(url)}")
    checked = as_body(BODIES[url], body)
    if isinstance(checked, CompletionBody) and checked.each() != [checked]:
        raise SnapKVError("prompt must be one text in a file of requests: write a line for each")
    servers = {"n", "logprobs", "top_logprobs", "full_cache"}
    for name, value in checked.model_dump(include=servers).items():
        if value and (name, value) != ("n", 1):
            raise SnapKVError(f"{name} is not supported in a file of requests: drop the field")
    return checked


def as_body(kind: type[Checked], body: Any) -> Checked:
    """A body of that kind; SnapKVError as `parse`."""
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
