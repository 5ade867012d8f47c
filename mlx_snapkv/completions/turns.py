"""The messages of a chat as chat templates take them: in turns, and as dictionaries."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any

from .contents import BREAK, as_json
from .messages import Message, whole


def in_turns(messages: Iterable[Message]) -> list[Message]:
    """Messages of which those in a row of a role are one, since many templates want roles to alternate.

    Results are in the order of their calls: most templates name neither's id.

    A system message after the beginning, as agents send, becomes the user's: many templates have no other place for
    it, and moving it to the front would change a prefix that is already known.
    """
    turns: list[Message] = []
    for message in in_order_of_calls(messages):
        if message.notes and not (
            message.text or message.reasoning or message.calls or message.call_id
        ):
            continue  # all of it is left out
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


def in_order_of_calls(messages: Iterable[Message]) -> Iterator[Message]:
    """Messages of which results in a row are in the order of the calls before them, where these have ids."""
    places: dict[str, int] = {}
    for role, group in groupby(messages, lambda message: message.role):
        if role == "tool":
            group = iter(sorted(group, key=lambda each: places.get(each.call_id, len(places))))
        elif role == "assistant":
            said = list(group)
            ids = dict.fromkeys(call["id"] for each in said for call in each.calls)
            places, group = {name: n for n, name in enumerate(ids)}, iter(said)
        yield from group


def _joined(first: Message, second: Message) -> Message:
    return Message(
        first.role,
        _apart(first.text, second.text),
        _apart(first.reasoning, second.reasoning),
        first.calls + second.calls,
        extra=first.extra | second.extra,
        notes=first.notes + second.notes,
    )


def _apart(first: str, second: str) -> str:
    return first + BREAK + second if first and second else first + second


def for_template(message: Message) -> dict[str, Any]:
    """A message as chat templates take it."""
    fields: dict[str, Any] = {**message.extra, "role": message.role, "content": whole(message.text)}
    if message.reasoning:
        fields["reasoning_content"] = whole(message.reasoning)
    if message.calls:
        fields["tool_calls"] = whole(list(message.calls))
    if message.call_id:
        fields["tool_call_id"] = message.call_id
    return fields


def calls_as_text(message: Message) -> Message:
    """A message whose calls, or whose result of one, are text, for a template that knows neither."""
    lines = [
        f"[{f['name']} {as_json(f['arguments'])}]" for f in (c["function"] for c in message.calls)
    ]
    text = "\n".join([message.text, *lines] if message.text else lines)
    if message.role == "tool":
        return replace(message, role="user", text=f"[result]\n{message.text}", call_id="")
    return replace(message, text=text, calls=()) if lines else message
