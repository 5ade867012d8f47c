"""The messages of a chat, whichever API's client wrote them and in whatever form.

OpenAI's chat completions and responses and Anthropic's messages differ in where calls of tools, results and thoughts
stand. Clients mix the forms, and what they sent once they repeat with every later request.
"""

import contextlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from .checks import require
from .contents import BREAK, Shown, as_json, as_list, named, shown

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
OTHER_FORMS = (
    "content",
    "role",
    "type",
    "tool_calls",
    "function_call",
    "tool_call_id",
    "reasoning",
)
# By which a call's arguments go.
INPUT_KEYS = ("arguments", "input", "action", "operation", "queries", "code")
OWN = ("user", "system")  # whose words have to be read as they are
THOUGHTS = ("thinking", "reasoning", "redacted_thinking")


@dataclass(frozen=True)
class Message:
    """What somebody says; several are one where they come in a row.

    Attributes:
        calls: of tools, in OpenAI's form, with arguments as a value rather than as JSON.
        call_id: of the call that a tool's message answers.
        extra: fields that only some templates know.
        notes: sentences on what is left out.
    """

    role: str
    text: str = ""
    reasoning: str = ""
    calls: tuple[dict[str, Any], ...] = ()
    call_id: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def is_answer(item: Any) -> bool:
    """Whether this is an assistant's: what came before it has been answered."""
    role = item.get("role") if isinstance(item, dict) else None
    return isinstance(role, str) and ROLES.get(role.lower()) == "assistant"


def messages_of(item: Any, may_have_media: bool = False) -> list[Message]:
    """A message, or an item of a response's input, as a client has it.

    Args:
        may_have_media: an image of the user's is left out. Some clients put a tool's into a user's message behind its
            result, and another model may have answered this one.

    Raises: ValueError: nobody can read it.
    """
    require(isinstance(item, dict), "should be a valid object", item)
    kind = item.get("type")
    if "role" not in item and isinstance(kind, str) and kind != "message":
        return _item(item, kind)
    require("role" in item, ".role is missing", item)
    role = ROLES.get(item["role"].lower()) if isinstance(item["role"], str) else None
    roles = ", ".join(map(repr, ROLES))
    require(role is not None, f".role should be one of {roles}", item["role"])
    assert role is not None
    if role == "tool":
        call_id = item.get("tool_call_id") or item.get("name") or ""
        return [replace(result(item, call_id, item.get("content")), extra=_extra(item))]
    return _spoken(item, role, may_have_media)


def _spoken(item: dict[str, Any], role: str, may_have_media: bool) -> list[Message]:
    """A message with a role, in the order of its parts; what tools answered comes before what else the user says."""
    parts = as_list(item.get("content"))
    may_have_media = may_have_media or any(_kind(part) == "result" for part in parts)
    messages = list(_content(parts, role, is_own=role in OWN and not may_have_media))
    thought = item.get("reasoning_content") or item.get("reasoning")
    if role == "assistant" and isinstance(thought, str):
        messages.insert(0, Message(role, reasoning=thought))
    calls = as_list(item.get("tool_calls")) + as_list(item.get("function_call"))
    messages.append(Message(role, calls=tuple(call_of(c) for c in calls if isinstance(c, dict))))
    messages = [m for m in messages if m.text or m.reasoning or m.calls or m.role == "tool"]
    if role == "user":
        messages.sort(key=lambda message: message.role == "user")
    messages = messages or [Message(role)]
    n = next((i for i, message in enumerate(messages) if message.role == role), None)
    if n is not None:
        messages[n] = replace(messages[n], extra=_extra(item))
    return messages


def _extra(item: dict[str, Any]) -> dict[str, Any]:
    taken = (*OTHER_FORMS, "reasoning_content")
    return {name: value for name, value in item.items() if name not in taken and value is not None}


def _content(content: list[Any], role: str, is_own: bool = False) -> Iterator[Message]:
    for kind, parts in groupby(content, _kind):
        if kind == "text":
            yield _message(role, shown(list(parts), "own" if is_own else "other"), "")
            continue
        for part in parts:
            if kind == "thought":
                yield Message("assistant", reasoning=_thought(part))
            elif kind == "call":
                yield Message("assistant", calls=(call_of(part),))
            else:
                yield result(part, part.get("tool_use_id"), part.get("content"))


def _kind(part: Any) -> str:
    """What a part of a content is: a call, a result, a thought, or what all others are."""
    kind = named(part) if isinstance(part, dict) else ""
    if kind in THOUGHTS:
        return "thought"
    if kind.endswith("tool_use"):
        return "call"
    return "result" if kind.endswith("tool_result") else "text"


def _thought(part: dict[str, Any]) -> str:
    text = part.get("thinking") or part.get("reasoning") or part.get("text")
    return text if isinstance(text, str) else ""


def _message(role: str, parts: Iterable[Shown], between: str) -> Message:
    shown_parts = list(parts)
    text = between.join(part.text for part in shown_parts)
    notes = (part.note for part in shown_parts if part.note)
    return Message(role, text, notes=tuple(dict.fromkeys(notes)))


def result(item: dict[str, Any], call_id: Any, content: Any) -> Message:
    """What a tool has answered, in an item that may say that it has failed."""
    parts = (
        part._replace(text=part.text.strip("\n")) if part.note else part for part in shown(content)
    )
    message = _message("tool", parts, BREAK)
    failure = _failure(item)
    if failure.lower() not in message.text.lower():
        message = replace(message, text=f"{failure}\n{message.text}".rstrip())
    return replace(message, call_id=str(call_id or ""))


def _failure(item: dict[str, Any]) -> str:
    """What an item says of a call that has failed, in any API's field; nothing of another call."""
    error = item.get("error")
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        error = error["message"]
    if error:
        return f"error: {error if isinstance(error, str) else as_json(error)}"
    has_failed = item.get("is_error") is True or item.get("status") in ("failed", "error")
    return "error" if has_failed else ""


def call_of(call: dict[str, Any]) -> dict[str, Any]:
    """A call of a tool in OpenAI's form, from any other."""
    inner = next(
        (call[key] for key in ("function", "custom") if isinstance(call.get(key), dict)), call
    )
    arguments = next((inner[key] for key in INPUT_KEYS if key in inner), None)
    name, call_id = inner.get("name") or call.get("name"), call.get("call_id") or call.get("id")
    if not isinstance(name, str):
        name = named(call).removesuffix("_call")
    if "custom" in named(call) and isinstance(arguments, str):
        arguments = {"input": arguments}
    name = full_name(name, call.get("namespace"))
    function = {"name": name, "arguments": arguments_of(arguments)}
    return {"id": str(call_id or ""), "type": "function", "function": function}


def full_name(name: str, namespace: Any) -> str:
    """A tool's name as templates take it; MCP servers' namespaces may end as its parts are joined."""
    return f"{namespace.rstrip('_')}__{name}" if isinstance(namespace, str) and namespace else name


def arguments_of(value: Any) -> Any:
    """A call's arguments: an object, or the text that is not JSON."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return {}
    if not isinstance(value, str):
        return value
    try:
        arguments = json.loads(value)
    except (ValueError, RecursionError):
        return value
    if isinstance(arguments, str) and arguments.lstrip().startswith("{"):  # JSON in JSON
        return arguments_of(arguments)
    return value if isinstance(arguments, str) else arguments


def _item(item: dict[str, Any], kind: str) -> list[Message]:
    """An item of a response's input that is no message."""
    if kind == "item_reference":
        raise ValueError(
            "refers to an earlier response, and nothing is stored here: send the item itself"
        )
    if kind == "reasoning":
        text = "".join(part.text for part in shown(item.get("content")))
        return [Message("assistant", reasoning=text)] if text else []  # others hide theirs
    if kind.endswith("_output"):
        return [result(item, item.get("call_id"), item.get("output", item.get("tools")))]
    if kind == "function_call" or (kind.endswith("_call") and item.get("call_id")):
        return [Message("assistant", calls=(call_of(item),))]
    found = item.get("output", item.get("outputs", item.get("results")))
    if kind.endswith("_call") and ("output" in item or found):  # a service's, with its result
        return [Message("assistant", calls=(call_of(item),)), result(item, item.get("id"), found)]
    if kind in ("tool_use", "tool_result", *THOUGHTS):
        return list(_content([item], "assistant"))
    note = f"an item of the type {kind[:40]} is left out"
    return [Message("assistant", notes=(note,))]


def mended(text: str) -> str:
    """A text with U+FFFD where it has half a character."""
    with contextlib.suppress(UnicodeEncodeError):
        text.encode()
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def whole(value: Any) -> Any:
    """A value whose texts have no half characters, as a text that was cut may have; a text of nothing else stays."""
    if isinstance(value, str):
        return text if (text := mended(value)).strip("\ufffd") else value
    if isinstance(value, list):
        return [whole(each) for each in value]
    if isinstance(value, dict):
        return {name: whole(each) for name, each in value.items()}
    return value
