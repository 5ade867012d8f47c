"""Parse chat messages from the request bodies of all APIs.

OpenAI's Chat Completions, OpenAI's Responses and Anthropic's Messages put tool calls, tool results and reasoning in
different places. Clients mix these formats, and send old messages again with every request.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from .contents import SEPARATOR, Source, TextPart, as_json, as_list, part_type, text_parts
from .validation import require

ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {
    "developer": "system",
    "root": "system",
    "platform": "system",
    "human": "user",
    "ai": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function": "tool",
    "ipython": "tool",
    "environment": "tool",
    "observation": "tool",
    "tool_response": "tool",
    "tool_result": "tool",
}
# The fields of a client's message that are parsed. All others go into `Message.extra`.
PARSED_FIELDS = {
    "content",
    "role",
    "type",
    "tool_calls",
    "function_call",
    "tool_call_id",
    "reasoning",
    "reasoning_content",
}
# Fields that may contain a call's arguments, in order of precedence.
ARGUMENT_FIELDS = ("arguments", "input", "action", "operation", "queries", "code")
THOUGHT_TYPES = ("thinking", "reasoning", "redacted_thinking")


@dataclass(frozen=True)
class Message:
    """A message from one role: text with reasoning and tool calls, or a tool result.

    Attributes:
        role: "system", "user", "assistant" or "tool".
        calls: tool calls in OpenAI's format, except that `arguments` is a value rather than JSON text.
        call_id: for a "tool" message, the id of its call.
        extra: fields that only some chat templates read.
        notes: sentences about omitted parts of the client's message.
    """

    role: str
    text: str = ""
    reasoning: str = ""
    calls: tuple[dict[str, Any], ...] = ()
    call_id: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def has_content(self) -> bool:
        """Return whether the message has text, reasoning or tool calls."""
        return bool(self.text or self.reasoning or self.calls)


def is_from_assistant(item: Any) -> bool:
    """Return whether a client's message is from the assistant."""
    role = item.get("role") if isinstance(item, dict) else None
    return isinstance(role, str) and ROLES.get(role.lower()) == "assistant"


def parse_message(item: Any, may_have_media: bool = False) -> list[Message]:
    """Parse one chat message, or one input item of the Responses API. Calls and results become separate messages.

    Args:
        item: the message or item, as the client sent it.
        may_have_media: whether media in a user or system message are described to the model rather than rejected. True
            after a tool result, because clients send the tool's images there. Also true for messages that have already
            been answered, because another model may have read their media.

    Raises: ValueError: the item has an unknown format, only refers to an earlier response, or has media that must be
        rejected.
    """
    require(isinstance(item, dict), "should be a valid object", item)
    kind = item.get("type")
    if "role" not in item and isinstance(kind, str) and kind != "message":
        return _parse_response_item(item, kind)
    require("role" in item, ".role is missing", item)
    client_role = item["role"]
    role = ROLES.get(client_role.lower()) if isinstance(client_role, str) else None
    known_roles = ", ".join(map(repr, ROLES))
    require(role is not None, f".role should be one of {known_roles}", client_role)
    assert role is not None  # for mypy
    if role == "tool":
        call_id = item.get("tool_call_id") or item.get("name") or ""
        result = _result_message(item, call_id, item.get("content"))
        return [replace(result, extra=_extra_fields(item))]
    return _parse_chat_message(item, role, may_have_media)


def _parse_chat_message(item: dict[str, Any], role: str, may_have_media: bool) -> list[Message]:
    """Parse a system, user or assistant message, keeping the order of its parts with one exception.

    Tool results in a user message are moved before the user's text, because they belong to the preceding calls. The
    item's `extra` fields go to the first message with the item's role.
    """
    parts = as_list(item.get("content"))
    has_result = any(_part_kind(part) == "result" for part in parts)
    refuses_media = role in ("user", "system") and not (may_have_media or has_result)
    source: Source = "user" if refuses_media else "other"
    messages = list(_content_messages(parts, role, source))
    reasoning = item.get("reasoning_content") or item.get("reasoning")
    if role == "assistant" and isinstance(reasoning, str):
        messages.insert(0, Message(role, reasoning=reasoning))
    # OpenAI's calls are fields of the message, while Anthropic's are parts of its content.
    openai_calls = as_list(item.get("tool_calls")) + as_list(item.get("function_call"))
    calls = tuple(_parse_call(call) for call in openai_calls if isinstance(call, dict))
    messages.append(Message(role, calls=calls))
    messages = [message for message in messages if message.has_content or message.role == "tool"]
    if role == "user":
        messages.sort(key=lambda message: message.role == "user")  # results (False) come first
    if not messages:
        messages = [Message(role)]
    for index, message in enumerate(messages):
        if message.role == role:
            messages[index] = replace(message, extra=_extra_fields(item))
            break
    return messages


def _extra_fields(item: dict[str, Any]) -> dict[str, Any]:
    """Return the message fields that are neither parsed nor null, unchanged."""
    return {
        name: value
        for name, value in item.items()
        if name not in PARSED_FIELDS and value is not None
    }


def _content_messages(parts: list[Any], role: str, source: Source) -> Iterator[Message]:
    """Yield one message per run of text parts, and one per reasoning, call or result part."""
    for kind, parts_of_kind in groupby(parts, _part_kind):
        if kind == "text":
            texts = text_parts(list(parts_of_kind), source)
            yield _join_parts(role, texts, separator="")
            continue
        for part in parts_of_kind:
            if kind == "thought":
                yield Message("assistant", reasoning=_thought_text(part))
            elif kind == "call":
                yield Message("assistant", calls=(_parse_call(part),))
            else:
                yield _result_message(part, part.get("tool_use_id"), part.get("content"))


def _part_kind(part: Any) -> str:
    """Return the kind of a content part: "thought", "call", "result", or "text" for anything else."""
    kind = part_type(part) if isinstance(part, dict) else ""
    if kind in THOUGHT_TYPES:
        return "thought"
    if kind.endswith("tool_use"):
        return "call"
    return "result" if kind.endswith("tool_result") else "text"


def _thought_text(part: dict[str, Any]) -> str:
    text = part.get("thinking") or part.get("reasoning") or part.get("text")
    return text if isinstance(text, str) else ""


def _join_parts(role: str, parts: Iterable[TextPart], separator: str) -> Message:
    """Join text parts and their distinct notes into one message."""
    texts = []
    notes = []
    for part in parts:
        texts.append(part.text)
        if part.note:
            notes.append(part.note)
    return Message(role, separator.join(texts), notes=tuple(dict.fromkeys(notes)))


def _result_message(item: dict[str, Any], call_id: Any, content: Any) -> Message:
    """Convert a tool result to a message.

    If `item` reports an error that the result's text does not contain, the error is prepended.
    """
    parts = []
    for part in text_parts(content):
        # A part with a note is a placeholder. Drop the line breaks around it, because the separator takes their place.
        is_placeholder = part.note is not None
        parts.append(part._replace(text=part.text.strip("\n")) if is_placeholder else part)
    message = _join_parts("tool", parts, SEPARATOR)
    failure = _failure_text(item)
    if failure.lower() not in message.text.lower():
        message = replace(message, text=f"{failure}\n{message.text}".rstrip())
    return replace(message, call_id=str(call_id or ""))


def _failure_text(item: dict[str, Any]) -> str:
    """Return the error that a tool result reports in any API's format, or ""."""
    error = item.get("error")
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        error = error["message"]
    if error:
        error_text = error if isinstance(error, str) else as_json(error)
        return f"error: {error_text}"
    has_failed = item.get("is_error") is True or item.get("status") in ("failed", "error")
    return "error" if has_failed else ""


def _parse_call(call: dict[str, Any]) -> dict[str, Any]:
    """Convert a tool call from any API to OpenAI's format, but with the arguments as a value."""
    # The name and arguments may be in a nested object.
    nested_objects = [
        call[key] for key in ("function", "custom") if isinstance(call.get(key), dict)
    ]
    fields, *_ = [*nested_objects, call]
    argument_values = (fields[key] for key in ARGUMENT_FIELDS if key in fields)
    arguments = next(argument_values, None)
    if "custom" in part_type(call) and isinstance(arguments, str):
        arguments = {"input": arguments}
    name = fields.get("name") or call.get("name")
    # Calls to built-in tools have no name, only a type such as "web_search_call".
    if not isinstance(name, str):
        name = part_type(call).removesuffix("_call")
    function = {
        "name": full_name(name, call.get("namespace")),
        "arguments": parse_arguments(arguments),
    }
    call_id = call.get("call_id") or call.get("id") or ""
    return {"id": str(call_id), "type": "function", "function": function}


def full_name(name: str, namespace: Any) -> str:
    """Return a tool's name with its namespace, as `namespace__name`. MCP namespaces may already end in "__"."""
    if not isinstance(namespace, str) or not namespace:
        return name
    return f"{namespace.rstrip('_')}__{name}"


def parse_arguments(value: Any) -> Any:
    """Parse a call's arguments. JSON text is parsed, other text is kept, and missing arguments become {}."""
    if value is None:
        return {}
    if not isinstance(value, str):
        return value
    if not value.strip():
        return {}
    try:
        arguments = json.loads(value)
    except (ValueError, RecursionError):
        return value
    if not isinstance(arguments, str):
        return arguments
    is_json_within_json = arguments.lstrip().startswith("{")
    return parse_arguments(arguments) if is_json_within_json else value


def _parse_response_item(item: dict[str, Any], kind: str) -> list[Message]:
    """Parse a Responses API input item that is not a message.

    Raises: ValueError: the item only refers to an earlier response.
    """
    if kind == "item_reference":
        raise ValueError(
            "refers to an earlier response, and nothing is stored here: send the item itself"
        )
    if kind == "reasoning":
        text = "".join(part.text for part in text_parts(item.get("content")))
        # The text is empty if the reasoning is encrypted, as OpenAI's is.
        return [Message("assistant", reasoning=text)] if text else []
    if kind.endswith("_output"):
        result = item.get("output", item.get("tools"))  # a tool search outputs `tools`
        return [_result_message(item, item.get("call_id"), result)]
    is_call = kind.endswith("_call")
    is_call_of_client = kind == "function_call" or (is_call and item.get("call_id"))
    if is_call_of_client:
        return [Message("assistant", calls=(_parse_call(item),))]
    output = item.get("output", item.get("outputs", item.get("results")))
    has_output = "output" in item or bool(output)
    if is_call and has_output:
        # A built-in tool's item contains both the call and its result.
        call_message = Message("assistant", calls=(_parse_call(item),))
        return [call_message, _result_message(item, item.get("id"), output)]
    if kind in ("tool_use", "tool_result", *THOUGHT_TYPES):
        return list(_content_messages([item], "assistant", "other"))
    note = f"an item of the type {part_type(item)} is left out"
    return [Message("assistant", notes=(note,))]
