"""Convert the prompt of a request's body to tokens: messages and tools rendered with the chat template, or text."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..engine.generate import text_tokens
from ..engine.token_ids import require_in_vocabulary
from ..errors import SnapKVError, brief
from .body import Body, ChatBody
from .contents import MAX_TYPE_LENGTH, replace_surrogates_in
from .grammar import tool_name
from .messages import Message
from .rendering import initial_state, render
from .thinking import thinking_variables
from .tool_choice import ToolChoice

ONLY_FUNCTIONS = "only functions are known here"


@dataclass(frozen=True)
class Prompt:
    """A body's prompt as tokens. It contains no MLX arrays, so any thread can create it.

    Attributes:
        tokens: token ids.
        initial_state, tools, warnings, prefill: see `CompletionRequest`.
        tool_choice: the body's tool choice, or None if it is missing or was dropped.
    """

    tokens: list[int]
    initial_state: str = "normal"
    tools: list[dict[str, Any]] | None = None
    warnings: tuple[str, ...] = ()
    prefill: str = ""
    tool_choice: ToolChoice | None = None


class ToolOffer(NamedTuple):
    """A body's functions and tool choice. Built-in services, such as web search, are left out.

    Attributes:
        tools: the tools for the chat template. None if no tool may be called.
        choice: the body's tool choice, or None if it is missing or was dropped.
        notes: sentences about ignored tools and choices.
    """

    tools: list[dict[str, Any]] | None
    choice: ToolChoice | None
    notes: list[str]


def tokenize(body: Body, tokenizer, vocabulary_size: int = sys.maxsize) -> Prompt:
    """Convert a body's prompt to tokens.

    Args:
        body: the body of a chat or text completion.
        tokenizer: the model's tokenizer, with a chat template if `body` is a chat.
        vocabulary_size: size of the model's vocabulary, which may differ from the tokenizer's.

    Raises: SnapKVError: `tool_choice` selects tools by name but a tool has no name, the chat can't be rendered, the
        tokenizer fails, the prompt is empty, or a token is outside the vocabulary.
    """
    if isinstance(body, ChatBody):
        prompt = _chat_prompt(body, tokenizer)
    else:
        prompt = Prompt(_text_tokens(body.prompt, tokenizer))
    if not prompt.tokens:
        raise SnapKVError("the prompt is empty: give some text")
    require_in_vocabulary("prompt", prompt.tokens, min(len(tokenizer), vocabulary_size))
    return prompt


def _chat_prompt(body: ChatBody, tokenizer) -> Prompt:
    """Return a chat's prompt, which ends with the generation prompt or with the text that the answer continues."""
    offer = _tool_offer(body)
    variables, thinking_notes = thinking_variables(body, tokenizer)
    rendered = render(
        tokenizer,
        body.messages,
        offer.tools,
        variables | {"add_generation_prompt": True},
        may_continue=body.continue_final_message is not False,
    )
    message_notes = [note for message in body.messages for note in message.notes]
    return Prompt(
        tokens=rendered.tokens,
        initial_state=initial_state(tokenizer, rendered),
        tools=offer.tools,
        warnings=(*offer.notes, *message_notes, *thinking_notes, *rendered.notes),
        prefill=rendered.prefill,
        tool_choice=offer.choice,
    )


def context_tokens(body: ChatBody, tokenizer, context: Iterable[Message]) -> list[int]:
    """Return the tokens of messages rendered with the body's tools, without a generation prompt.

    Raises: SnapKVError: the template rejects the messages, or the model has no template.
    """
    variables, _ = thinking_variables(body, tokenizer)
    options = variables | {"add_generation_prompt": False}
    return render(tokenizer, context, _tool_offer(body).tools, options).tokens


def _tool_offer(body: ChatBody) -> ToolOffer:
    """Return a body's callable functions and its tool choice. Built-in services are omitted."""
    choice = body.tool_choice
    may_call = choice is None or choice.type != "none"
    client_tools = replace_surrogates_in(body.tools or []) if may_call else []
    services = [tool for tool in client_tools if _is_service(tool)]
    tools = [_function_tool(tool) for tool in client_tools if not _is_service(tool)]
    service_types = dict.fromkeys(str(tool["type"])[:MAX_TYPE_LENGTH] for tool in services)
    notes = [f"tools of the type {kind} are left out: {ONLY_FUNCTIONS}" for kind in service_types]
    if choice is None:
        return ToolOffer(tools or None, None, notes)
    if choice.allowed is not None:
        tools = [tool for tool in tools if tool_name(tool) in choice.allowed]
    if _forces_service(choice, tools, services):
        missing_service = f", no {choice.service}" if choice.service else ""
        notes.append(f"tool_choice is left out: {ONLY_FUNCTIONS}{missing_service}")
        choice = None
    return ToolOffer(tools or None, choice, notes)


def _forces_service(choice: ToolChoice, tools: list[Any], services: list[dict[str, Any]]) -> bool:
    """Return whether a choice forces a call to a built-in service. No services are available here."""
    if choice.service:
        return True
    if choice.type not in ("required", "function"):
        return False
    if choice.function is None:  # "required", but the client may offer only services
        return bool(services) and not tools
    return any(tool.get("name") == choice.function.name for tool in services)


def _is_service(tool: dict[str, Any]) -> bool:
    """Return whether a tool is a built-in service of an API, such as web search, rather than a function."""
    has_schema = "name" in tool and ("parameters" in tool or "input_schema" in tool)
    is_function = "function" in tool or tool.get("type", "function") == "function" or has_schema
    return not is_function


def _function_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Convert any API's function definition to the format of chat templates."""
    if "function" in tool:
        return {"type": "function", **tool}
    # Anthropic's name for `parameters` is `input_schema`. Keep the client's field order, because templates render the
    # fields to the model in this order.
    function = {
        "parameters" if field == "input_schema" else field: value
        for field, value in tool.items()
        if field != "type"
    }
    return {"type": "function", "function": function}


def _text_tokens(prompt: Any, tokenizer) -> list[int]:
    """Tokenise a prompt. A list already contains token ids, and is returned unchanged.

    Raises: SnapKVError: the tokenizer fails.
    """
    if isinstance(prompt, list):
        return prompt
    try:
        return text_tokens(tokenizer, replace_surrogates_in(prompt))
    except Exception as error:
        raise SnapKVError(f"the tokenizer failed: {brief(error)}") from error
