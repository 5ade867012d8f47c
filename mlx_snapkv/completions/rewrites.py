"""Chats that a template refuses, put differently, with as few changes as possible.

Templates raise errors on what their model was not trained on: system messages, ids of another form, a user's words
behind a result, several calls at once. Agents send all of that.
"""

import hashlib
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from .contents import as_json
from .messages import Message
from .turns import calls_as_text, in_turns

CALL_ID = re.compile("[a-zA-Z0-9]{9}")  # what Mistral's templates demand
SEEN = "OK."  # what the assistant says to a result, where a template wants it to
OMITTED = "(what was said before is left out)"

Given = tuple[list[Message], dict[str, Any]]


def _short_ids(turns: list[Message], options: dict[str, Any]) -> Given:
    """Calls by names of nine characters, the same for a client's name each time."""

    def short(name: str) -> str:
        return (
            name
            if CALL_ID.fullmatch(name)
            else hashlib.sha256(name.encode(errors="replace")).hexdigest()[:9]
        )

    def renamed(message: Message) -> Message:
        calls = tuple(call | {"id": short(call["id"])} for call in message.calls)
        is_result = message.role == "tool"
        return replace(message, calls=calls, call_id=short(message.call_id) if is_result else "")

    return [renamed(turn) for turn in turns], options


def _arguments(turns: list[Message], options: dict[str, Any], as_text: bool) -> Given:
    def changed(call: dict[str, Any]) -> dict[str, Any]:
        arguments = call["function"]["arguments"]
        if as_text:
            arguments = arguments if isinstance(arguments, str) else as_json(arguments)
        elif not isinstance(arguments, dict):
            arguments = {"input": arguments}
        return call | {"function": call["function"] | {"arguments": arguments}}

    return [replace(turn, calls=tuple(map(changed, turn.calls))) for turn in turns], options


def _described_tools(turns: list[Message], options: dict[str, Any]) -> Given:
    """Tools with all fields that templates may read."""
    usual = {"description": "", "parameters": {}}
    fields = {"type": "object", "properties": {}, "required": []}
    tools = []
    for tool in options.get("tools", []):
        if not isinstance(tool["function"], dict):
            return turns, options
        function = usual | {k: v for k, v in tool["function"].items() if v is not None}
        function["parameters"] = fields | function["parameters"]
        tools.append(tool | {"function": function})
    return turns, options | ({"tools": tools} if tools else {})


def _without_system(turns: list[Message], options: dict[str, Any]) -> Given:
    """The system's words as the user's first."""
    changed = [replace(turn, role="user") if turn.role == "system" else turn for turn in turns]
    return in_turns(changed), options


def _without_thoughts(turns: list[Message], options: dict[str, Any]) -> Given:
    """Calls without what was thought before them, which some templates take only where nothing was said."""
    return [replace(turn, reasoning="") if turn.calls else turn for turn in turns], options


def _one_call_each(turns: list[Message], options: dict[str, Any]) -> Given:
    """Calls that were made at once as if they had been made one after the other, each with its result."""
    changed: list[list[Message]] = []  # a call with its result, and all others alone
    waiting: dict[int, str] = {}  # calls without a result, by their place there
    for turn in turns:
        if turn.role == "tool":  # of the first call of its id, or else of any id
            of_id = (place for place, name in waiting.items() if name == turn.call_id)
            place = next(of_id, next(iter(waiting), len(changed)))
            if place == len(changed):
                changed.append([])
            changed[place].append(turn)
            waiting.pop(place, None)
            continue
        first, *rest = turn.calls or (None,)
        alone = [turn if first is None else replace(turn, calls=(first,))]
        for each in [*alone, *(Message(turn.role, calls=(call,)) for call in rest)]:
            if each.calls:
                waiting[len(changed)] = each.calls[0]["id"]
            changed.append([each])
    return [message for messages in changed for message in messages], options


def _with_answers(turns: list[Message], options: dict[str, Any]) -> Given:
    """A word of the assistant's before what the user says behind a call or its result, as agents' reminders are."""
    changed: list[Message] = []
    for turn in turns:
        last = changed[-1] if changed else None
        if turn.role == "user" and last is not None and (last.calls or last.role == "tool"):
            changed.append(Message("assistant", SEEN))
        changed.append(turn)
    return changed, options


def alternating(turns: list[Message], options: dict[str, Any]) -> Given:
    """Only what users and the assistant say, in turn, the user first."""
    changed = in_turns(map(calls_as_text, turns))
    n_system = len(changed) > 0 and changed[0].role == "system"
    if changed[n_system:] and changed[n_system].role == "assistant":
        changed.insert(n_system, Message("user", OMITTED))
    return changed, options


# These change nothing that is said: the first rewrite, and part of all others.
ALIKE = _short_ids, _described_tools
# The other changes, the least first; each is tried with the system message as it is, and then as the user's words.
CHANGES: list[tuple[Callable[..., Given], ...]] = [
    (),
    (partial(_arguments, as_text=False),),
    (partial(_arguments, as_text=True),),
    (_without_thoughts,),
    (_one_call_each,),
    (_with_answers,),
    (alternating,),
]
REWRITES: list[tuple[Callable[..., Given], ...]] = [
    (),
    *((*ALIKE, *system, *change) for change in CHANGES for system in ((), (_without_system,))),
]
NOTES = {
    _without_thoughts: "the chat template refuses thoughts beside a call: they are left out",
    _without_system: "the chat template refuses this system message: the user says it instead",
    alternating: "the chat template takes no such calls or order of roles: calls and results are put as text",
}
