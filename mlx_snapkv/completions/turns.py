"""Turns of a chat: messages with alternating roles, and the dictionaries that chat templates take."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any

from .contents import SEPARATOR, as_json, replace_surrogates_in
from .messages import Message


def in_turns(messages: Iterable[Message]) -> list[Message]:
    """Return messages with consecutive messages of one role joined, since many templates want alternating roles.

    Results are put in the order of their calls, since most templates show the id of neither.

    A system message after the beginning, which agents send, becomes the user's: many templates accept it nowhere else,
    and moving it to the front would change a prefix that may be in the prefix cache.
    """
    turns: list[Message] = []
    for message in _in_order_of_calls(messages):
        if message.notes and not (
            message.text or message.reasoning or message.calls or message.call_id
        ):
            continue  # everything in this message is left out
        last = turns[-1] if turns else None
        role = message.role
        if role == "system" and last is not None and last.role != "system":
            role = "user"
        message = replace(message, role=role)
        if last is None or role == "tool" or role != last.role:
            turns.append(message)
        else:
            turns[-1] = _joined(last, message)
    return turns


def _in_order_of_calls(messages: Iterable[Message]) -> Iterator[Message]:
    """Yield messages, with consecutive results in the order of the calls before them.

    Results whose id belongs to none of these calls come last.
    """
    order: dict[str, int] = {}
    for role, group in groupby(messages, lambda message: message.role):
        in_a_row = list(group)
        if role == "assistant":
            ids = dict.fromkeys(call["id"] for message in in_a_row for call in message.calls)
            order = {call_id: n for n, call_id in enumerate(ids)}
        elif role == "tool":
            in_a_row.sort(key=lambda message: order.get(message.call_id, len(order)))
        yield from in_a_row


def _joined(first: Message, second: Message) -> Message:
    return Message(
        first.role,
        _joined_text(first.text, second.text),
        _joined_text(first.reasoning, second.reasoning),
        first.calls + second.calls,
        extra=first.extra | second.extra,
        notes=first.notes + second.notes,
    )


def _joined_text(first: str, second: str) -> str:
    return first + SEPARATOR + second if first and second else first + second


def for_template(message: Message) -> dict[str, Any]:
    """Return a message as the dictionary that chat templates take."""
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
    """Return a message with its calls, or its result of a call, as text, for a template that knows no calls."""
    if message.role == "tool":
        return replace(message, role="user", text=f"[result]\n{message.text}", call_id="")
    if not message.calls:
        return message
    functions = [call["function"] for call in message.calls]
    lines = [f"[{function['name']} {as_json(function['arguments'])}]" for function in functions]
    text = "\n".join([message.text, *lines] if message.text else lines)
    return replace(message, text=text, calls=())
