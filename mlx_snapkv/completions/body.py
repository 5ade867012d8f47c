"""The bodies of OpenAI's two completion endpoints, checked."""

from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
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
from .part import Part
from .problems import as_body
from .response_format import ResponseFormat
from .tool_choice import AnyToolChoice

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


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
    tool_choice: AnyToolChoice = None
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


def parse(url: Any, body: Any) -> Body:
    """What a line of a file has as JSON for a url of `BODIES`, checked; it can ask for one answer.

    Raises: SnapKVError: as `as_body`.
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
