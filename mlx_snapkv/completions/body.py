"""Validate the request bodies of OpenAI's `/v1/chat/completions` and `/v1/completions`."""

from dataclasses import dataclass
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
from .contents import as_list
from .fields import (
    Bias,
    BodyModel,
    ContextSize,
    MaxTokens,
    NoneIfEmptyList,
    Number,
    Penalty,
    Probability,
    RepetitionPenalty,
    Seed,
    Stops,
    Temperature,
    TokenId,
    TopK,
    TopLogprobs,
    Unsupported,
    WholeFloat,
)
from .messages import Message, is_from_assistant, parse_message
from .response_format import ResponseFormat
from .tool_choice import AnyToolChoice
from .validation import error_sentence, require, shorten, validate_body

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def _parse_messages(items: Any) -> list[Message]:
    """Parse a list of chat messages, or of input items from the Responses API.

    Raises: ValueError: `items` is not a list or is empty, an item is invalid, or the chat has only empty system and
        user messages. An error about an item starts with the item's index.
    """
    require(isinstance(items, list), "should be a valid list", items)
    require(bool(items), "must not be empty", items)
    messages: list[Message] = []
    answer_numbers = [number for number, item in enumerate(items) if is_from_assistant(item)]
    last_answer_number = max(answer_numbers, default=0)
    for number, item in enumerate(items):
        if isinstance(item, Message):  # already parsed from another API's body
            messages.append(item)
            continue
        follows_tool_result = bool(messages) and messages[-1].role == "tool"
        was_answered = number < last_answer_number
        may_have_media = follows_tool_result or was_answered
        try:
            messages += parse_message(item, may_have_media)
        except ValueError as error:
            # The client sees an error such as "messages.3.content ...".
            raise ValueError(error_sentence(f".{number}", rule=str(error))) from None
    has_content = any(
        message.has_content or message.role in ("assistant", "tool") for message in messages
    )
    last_number = len(items) - 1
    require(has_content, f".{last_number}.content must not be empty", "")
    return messages


MESSAGES_SCHEMA = {"type": "array", "items": {"type": "object"}, "minItems": 1}
Messages = Annotated[
    list[InstanceOf[Message]], BeforeValidator(_parse_messages), WithJsonSchema(MESSAGES_SCHEMA)
]


class StreamOptions(BodyModel):
    """OpenAI's `stream_options`. With `include_usage`, the stream ends with an event that reports token counts."""

    include_usage: bool | None = None


class CommonBody(BodyModel):
    """The fields that both endpoints share. A field is None if the client did not send it.

    Unknown fields are ignored, but kept in `model_extra` for warnings. Unsupported fields that would change the answer
    are rejected.
    """

    model_config = ConfigDict(extra="allow")

    @property
    def uses_functions(self) -> bool:
        """Return whether the client sends `functions`, the predecessor of `tools`, and expects a `function_call`."""
        return False

    model: str | None = None
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: TopK | None = None
    min_p: Probability | None = None
    xtc_probability: Probability | None = None
    xtc_threshold: Annotated[Number, Field(ge=0, le=0.5)] | None = None
    seed: Seed = None
    stop: Stops | None = None
    logit_bias: Annotated[dict[TokenId, Bias] | None, NoneIfEmptyList] = None
    frequency_penalty: Penalty | None = None
    frequency_context_size: ContextSize | None = None
    presence_penalty: Penalty | None = None
    presence_context_size: ContextSize | None = None
    repetition_penalty: RepetitionPenalty | None = None
    repetition_context_size: ContextSize | None = None
    n: Annotated[int, Field(ge=1, le=8), WholeFloat] | None = None
    stream: bool | None = None
    stream_options: Annotated[StreamOptions | None, NoneIfEmptyList] = None
    # If True, answer from the full cache, without compression or sparse attention.
    full_cache: bool | None = None


class ChatBody(CommonBody):
    """The body of `/v1/chat/completions`."""

    messages: Messages
    tools: list[dict[str, Any]] | None = None
    tool_choice: AnyToolChoice = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, NoneIfEmptyList] = None
    functions: list[dict[str, Any]] | None = None
    # vLLM's field. If False, the answer does not continue a final assistant message.
    continue_final_message: bool | None = None
    audio: Unsupported = None
    modalities: list[Literal["text"]] | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    # `thinking_variables` reads the next five fields.
    reasoning_effort: Any = None
    reasoning: Any = None
    thinking: Any = None
    enable_thinking: Any = None
    think: Any = None

    @property
    def uses_functions(self) -> bool:
        """Return whether the client sends `functions`, and so expects a `function_call`."""
        return bool(self.functions)

    @model_validator(mode="before")
    @classmethod
    def _functions_as_tools(cls, body: Any) -> Any:
        """Convert the older fields `functions` and `function_call` to `tools` and `tool_choice`."""
        if not isinstance(body, dict):
            return body
        fields = {name: value for name, value in body.items() if name != "function_call"}
        choice = body.get("function_call")
        if choice is not None and body.get("tool_choice") is None:
            names_function = isinstance(choice, dict)  # rather than "auto" or "none"
            fields["tool_choice"] = (
                {"type": "function", "function": choice} if names_function else choice
            )
        if body.get("tools"):
            fields.pop("functions", None)  # `tools` replaces it
            return fields
        functions = as_list(body.get("functions"))
        if functions:
            fields["tools"] = [{"type": "function", "function": function} for function in functions]
        return fields


def _logprobs_as_number(value: Any) -> Any:
    """Convert a boolean `logprobs`, as in chat bodies, to 0 or None. Return other values unchanged."""
    if isinstance(value, bool):
        return 0 if value else None
    return value


class CompletionBody(CommonBody):
    """The body of `/v1/completions`."""

    # One or more prompts, as text or token ids.
    prompt: str | list[int] | list[str] | list[list[int]]
    best_of: Annotated[Literal[1], WholeFloat] | None = None
    echo: Literal[False] | None = None
    suffix: Unsupported = None
    logprobs: Annotated[TopLogprobs | None, BeforeValidator(_logprobs_as_number)] = None

    @property
    def has_prompt_list(self) -> bool:
        """Return whether `prompt` is a list of prompts, rather than one text or the token ids of one prompt."""
        is_list = isinstance(self.prompt, list) and len(self.prompt) > 0
        return is_list and not isinstance(self.prompt[0], int)

    def split_prompts(self) -> list["CompletionBody"]:
        """Return one body per prompt."""
        if not self.has_prompt_list:
            return [self]
        return [self.model_copy(update={"prompt": prompt}) for prompt in self.prompt]


@dataclass(frozen=True)
class Defaults:
    """Values for fields that a body omits, named after mlx-lm's flags. Temperature 0 means greedy decoding."""

    max_tokens: int = 256
    temp: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    min_tokens_to_keep: int = 1
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1


Body = ChatBody | CompletionBody
BODIES: dict[str, type[Body]] = {CHAT: ChatBody, COMPLETIONS: CompletionBody}


def parse_body(url: Any, body: Any) -> Body:
    """Validate the `url` and `body` of one line in a file of requests.

    Raises: SnapKVError: the url is not in `BODIES`, the body is invalid, or the body has a field or a list of prompts
        that only the server supports.
    """
    if not isinstance(url, str) or url not in BODIES:
        raise SnapKVError(f"url must be {' or '.join(BODIES)}, got {shorten(url)}")
    parsed_body = validate_body(BODIES[url], body)
    if isinstance(parsed_body, CompletionBody) and parsed_body.has_prompt_list:
        raise SnapKVError("prompt must be one text in a file of requests: write a line for each")
    server_fields = {"n", "logprobs", "top_logprobs", "full_cache"}
    for name, value in parsed_body.model_dump(include=server_fields).items():
        is_default = not value or (name == "n" and value == 1)
        if not is_default:
            raise SnapKVError(f"{name} is not supported in a file of requests: drop the field")
    return parsed_body
