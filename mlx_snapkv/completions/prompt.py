"""A body's prompt in the model's tokens: its messages and tools in the chat template, or its text."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..engine.generate import text_tokens
from ..engine.token_ids import require_in_vocabulary
from ..errors import SnapKVError, brief
from .body import Body, ChatBody
from .grammar import name_of
from .messages import Message, whole
from .rendering import Rendered, initial_state, render
from .thinking import thinking_options
from .tool_choice import ToolChoice

ONLY_FUNCTIONS = "only functions are known here"


@dataclass(frozen=True)
class Prompt:
    """What a body is in the model's tokens, which any thread can find: no arrays are made of it.

    Attributes:
        state, tools, warnings, prefill: as of `CompletionRequest`.
        choice: the body's `tool_choice`, unless it is left out.
    """

    tokens: list[int]
    state: str = "normal"
    tools: list[dict[str, Any]] | None = None
    warnings: tuple[str, ...] = ()
    prefill: str = ""
    choice: ToolChoice | None = None


def tokenised(body: Body, tokenizer, vocabulary: int = sys.maxsize) -> Prompt:
    """A body's prompt, for a model that knows the first so many of the tokenizer's tokens.

    Raises: SnapKVError: the chat template refuses, or a token is not one of the vocabulary's.
    """
    if isinstance(body, ChatBody):
        tools, choice, warnings = _tools(body)
        rendered, notes = _rendered(body, tokenizer, body.messages, tools)
        state, told = initial_state(tokenizer, rendered), (*warnings, *notes)
        prompt = Prompt(rendered.tokens, state, tools, told, rendered.prefill, choice)
    else:
        prompt = Prompt(_text_tokens(body.prompt, tokenizer))
    if not prompt.tokens:
        raise SnapKVError("the prompt is empty: give some text")
    require_in_vocabulary("prompt", prompt.tokens, min(len(tokenizer), vocabulary))
    return prompt


def _tools(body: ChatBody) -> tuple[list[dict[str, Any]] | None, ToolChoice | None, list[str]]:
    """The tools as chat templates take them, the choice among them, and what is left out."""
    choice = body.tool_choice
    given = [] if choice is not None and choice.type == "none" else whole(body.tools or [])
    services = [tool for tool in given if _is_service(tool)]
    tools = [_function(tool) for tool in given if not _is_service(tool)]
    kinds = dict.fromkeys(str(tool["type"])[:40] for tool in services)
    notes = [f"tools of the type {kind} are left out: {ONLY_FUNCTIONS}" for kind in kinds]
    if choice is not None and choice.allowed is not None:
        tools = [tool for tool in tools if name_of(tool) in choice.allowed]
    if choice is not None and _is_of_service(choice, tools, services):
        no = f", no {choice.service}" if choice.service else ""
        notes.append(f"tool_choice is left out: {ONLY_FUNCTIONS}{no}")
        choice = None
    return tools or None, choice, notes


def _is_of_service(choice: ToolChoice, tools: list[Any], services: list[dict[str, Any]]) -> bool:
    """Whether a choice forces a call of a tool that is left out."""
    if choice.service:
        return True
    if choice.type not in ("required", "function"):
        return False
    if choice.function is None:
        return bool(services) and not tools
    return any(tool.get("name") == choice.function.name for tool in services)


def _is_service(tool: dict[str, Any]) -> bool:
    """Whether this is a tool that only a service runs, in no form of a function's."""
    has_schema = "name" in tool and ("parameters" in tool or "input_schema" in tool)
    return not ("function" in tool or tool.get("type", "function") == "function" or has_schema)


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    """A function in any form, Anthropic's as well, as chat templates take it."""
    if "function" in tool:
        return {"type": "function", **tool}
    names = {"input_schema": "parameters"}
    fields = {names.get(name, name): value for name, value in tool.items() if name != "type"}
    return {"type": "function", "function": fields}


def _rendered(
    body: ChatBody,
    tokenizer,
    messages: Iterable[Message],
    tools: list[dict[str, Any]] | None,
    answers: bool = True,
) -> tuple[Rendered, list[str]]:
    """The messages in the chat template, to be answered or not, and what is left out of them."""
    messages = list(messages)
    how, notes = thinking_options(body, tokenizer)
    continues = answers and body.continue_final_message is not False
    options = how | {"add_generation_prompt": answers}
    rendered = render(tokenizer, messages, tools, options, continues)
    return rendered, [*(note for each in messages for note in each.notes), *notes, *rendered.notes]


def context_tokens(body: ChatBody, tokenizer, context: Iterable[Message]) -> list[int]:
    """Messages that are only a context in the chat template, with the body's tools.

    Raises: SnapKVError: the template refuses, or there is none.
    """
    tools, _, _ = _tools(body)
    return _rendered(body, tokenizer, context, tools, answers=False)[0].tokens


def _text_tokens(prompt: Any, tokenizer) -> list[int]:
    if isinstance(prompt, list):
        return prompt
    try:
        return text_tokens(tokenizer, whole(prompt))
    except Exception as error:
        raise SnapKVError(f"the tokenizer failed: {brief(error)}") from error
