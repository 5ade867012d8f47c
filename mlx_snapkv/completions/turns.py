"""Merge a chat's messages into turns with alternating roles, and convert them for chat templates."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any

from .contents import SEPARATOR, as_json, replace_surrogates_in
from .messages import Message


def merge_into_turns(messages: Iterable[Message]) -> list[Message]:
    """Merge consecutive messages of the same role, except tool results. Many templates require alternating roles.

    Tool results are sorted into the order of their calls, because most templates do not show ids.

    Agents also send system messages in the middle of a chat. These become user messages: many templates reject late
    system messages, and moving them to the front would change a prefix that may be in the prefix cache.
    """
    turns: list[Message] = []
    for message in _in_order_of_calls(messages):
        is_empty = not message.has_content and not message.call_id
        is_omitted = message.notes and is_empty
        if is_omitted:
            continue
        if not turns:
            turns.append(message)
            continue
        last_turn = turns[-1]
        is_late_system_message = message.role == "system" and last_turn.role != "system"
        if is_late_system_message:
            message = replace(message, role="user")
        if message.role == "tool" or message.role != last_turn.role:
            turns.append(message)
        else:
            turns[-1] = _merge(last_turn, message)
    return turns


def _in_order_of_calls(messages: Iterable[Message]) -> Iterator[Message]:
    """Yield messages, with consecutive tool results in the order of the preceding calls.

    Results that match none of these calls come last.
    """
    call_numbers: dict[str, int] = {}  # maps the id of each preceding call to its position
    for role, group in groupby(messages, lambda message: message.role):
        messages_of_role = list(group)
        if role == "assistant":
            # A dict, so that a repeated id is numbered only once.
            call_ids = dict.fromkeys(
                call["id"] for message in messages_of_role for call in message.calls
            )
            call_numbers = {call_id: number for number, call_id in enumerate(call_ids)}
        elif role == "tool":
            last_number = len(call_numbers)
            messages_of_role.sort(key=lambda result: call_numbers.get(result.call_id, last_number))
        yield from messages_of_role


def _merge(first: Message, second: Message) -> Message:
    """Merge two messages of the same role."""
    return Message(
        role=first.role,
        text=_join_texts(first.text, second.text),
        reasoning=_join_texts(first.reasoning, second.reasoning),
        calls=first.calls + second.calls,
        extra=first.extra | second.extra,
        notes=first.notes + second.notes,
    )


def _join_texts(first: str, second: str) -> str:
    """Join two texts with a separator, unless one is empty."""
    return SEPARATOR.join(text for text in (first, second) if text)


def for_template(message: Message) -> dict[str, Any]:
    """Return a message as a dict for chat templates."""
    fields: dict[str, Any] = {
        **message.extra,
        "role": message.role,
        "content": replace_surrogates_in(message.text),
    }
    if message.reasoning:
        fields["reasoning_content"] = replace_surrogates_in(message.reasoning)
    if message.calls:
        fields["tool_calls"] = replace_surrogates_in(list(message.calls))
    if message.call_id:
        fields["tool_call_id"] = message.call_id
    return fields


def calls_as_text(message: Message) -> Message:
    """Turn a message's calls, or a tool result, into text for templates that don't support calls."""
    if message.role == "tool":
        return replace(message, role="user", text=f"[result]\n{message.text}", call_id="")
    if not message.calls:
        return message
    lines = [message.text] if message.text else []
    for call in message.calls:
        name = call["function"]["name"]
        arguments = as_json(call["function"]["arguments"])
        lines.append(f"[{name} {arguments}]")
    return replace(message, text="\n".join(lines), calls=())
