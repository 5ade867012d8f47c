"""Rewrites of a chat that its template refuses, from the smallest change to the largest.

Templates raise errors on what their model was not trained on: system messages, call ids of another form, a user's text
after a tool result, several calls at once. Agents send all of these.
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

MISTRAL_CALL_ID = re.compile("[a-zA-Z0-9]{9}")
ACKNOWLEDGEMENT = "OK."  # the assistant's text between a tool result and the user's next message
OMITTED = "(what was said before is left out)"

Chat = tuple[list[Message], dict[str, Any]]  # turns, and options of the template
Change = Callable[[list[Message], dict[str, Any]], Chat]


def _short_ids(turns: list[Message], options: dict[str, Any]) -> Chat:
    """Give calls the ids of nine characters that Mistral's templates demand: always the same for a client's id."""

    def shortened(call_id: str) -> str:
        if MISTRAL_CALL_ID.fullmatch(call_id):
            return call_id
        return hashlib.sha256(call_id.encode(errors="replace")).hexdigest()[:9]

    def renamed(turn: Message) -> Message:
        calls = tuple(call | {"id": shortened(call["id"])} for call in turn.calls)
        is_result = turn.role == "tool"
        return replace(turn, calls=calls, call_id=shortened(turn.call_id) if is_result else "")

    return [renamed(turn) for turn in turns], options


def _described_tools(turns: list[Message], options: dict[str, Any]) -> Chat:
    """Give tools all fields that templates may read."""
    function_fields = {"description": "", "parameters": {}}
    schema_fields = {"type": "object", "properties": {}, "required": []}
    tools = []
    for tool in options.get("tools", []):
        if not isinstance(tool["function"], dict):
            return turns, options
        function = function_fields | {k: v for k, v in tool["function"].items() if v is not None}
        function["parameters"] = schema_fields | function["parameters"]
        tools.append(tool | {"function": function})
    return turns, options | ({"tools": tools} if tools else {})


def _without_system(turns: list[Message], options: dict[str, Any]) -> Chat:
    """Make the system's message the user's first one."""
    changed = [replace(turn, role="user") if turn.role == "system" else turn for turn in turns]
    return in_turns(changed), options


def _convert_arguments(turns: list[Message], options: dict[str, Any], as_text: bool) -> Chat:
    """Make the arguments of all calls JSON text, or else objects."""

    def changed(call: dict[str, Any]) -> dict[str, Any]:
        arguments = call["function"]["arguments"]
        if as_text:
            arguments = arguments if isinstance(arguments, str) else as_json(arguments)
        elif not isinstance(arguments, dict):
            arguments = {"input": arguments}
        return call | {"function": call["function"] | {"arguments": arguments}}

    return [replace(turn, calls=tuple(map(changed, turn.calls))) for turn in turns], options


def _without_thoughts(turns: list[Message], options: dict[str, Any]) -> Chat:
    """Drop the thoughts of turns with calls. Some templates accept thoughts and a call only without text."""
    return [replace(turn, reasoning="") if turn.calls else turn for turn in turns], options


def _one_call_each(turns: list[Message], options: dict[str, Any]) -> Chat:
    """Split turns with several calls, so that each call is followed by its result.

    A result without a call of its id follows the first call that has no result yet.
    """
    groups: list[list[Message]] = []  # a call with its results, or any other turn alone
    open_calls: dict[int, str] = {}  # index in `groups` -> id of a call without a result
    for turn in turns:
        if turn.role == "tool":
            same_id = (index for index, call_id in open_calls.items() if call_id == turn.call_id)
            index = next(same_id, next(iter(open_calls), None))
            if index is None:
                groups.append([turn])
            else:
                groups[index].append(turn)
                del open_calls[index]
            continue
        first = replace(turn, calls=turn.calls[:1])
        rest = [Message(turn.role, calls=(call,)) for call in turn.calls[1:]]
        for message in [first, *rest]:
            if message.calls:
                open_calls[len(groups)] = message.calls[0]["id"]
            groups.append([message])
    return [message for group in groups for message in group], options


def _acknowledge_results(turns: list[Message], options: dict[str, Any]) -> Chat:
    """Put a short answer of the assistant's before a user's turn that follows a call or a result.

    Agents send reminders there.
    """
    changed: list[Message] = []
    for turn in turns:
        last = changed[-1] if changed else None
        if turn.role == "user" and last is not None and (last.calls or last.role == "tool"):
            changed.append(Message("assistant", ACKNOWLEDGEMENT))
        changed.append(turn)
    return changed, options


def alternating(turns: list[Message], options: dict[str, Any]) -> Chat:
    """Make all calls and results text, so that only the user and the assistant alternate. The user is first."""
    changed = in_turns(map(calls_as_text, turns))
    start = 1 if changed and changed[0].role == "system" else 0
    if changed[start:] and changed[start].role == "assistant":
        changed.insert(start, Message("user", OMITTED))
    return changed, options


# Changes that keep the meaning: every rewrite except the first makes them.
HARMLESS: tuple[Change, ...] = (_short_ids, _described_tools)
# Each is tried with the system's message as it is, and then as the user's.
ALTERNATIVES: list[tuple[Change, ...]] = [
    (),
    (partial(_convert_arguments, as_text=False),),
    (partial(_convert_arguments, as_text=True),),
    (_without_thoughts,),
    (_one_call_each,),
    (_acknowledge_results,),
    (alternating,),
]
REWRITES: list[tuple[Change, ...]] = [
    (),
    *(
        (*HARMLESS, *system, *alternative)
        for alternative in ALTERNATIVES
        for system in ((), (_without_system,))
    ),
]
NOTES = {
    _without_thoughts: "the chat template refuses thoughts beside a call: they are left out",
    _without_system: "the chat template refuses this system message: the user says it instead",
    alternating: "the chat template takes no such calls or order of roles: calls and results are put as text",
}


def rewritten(
    changes: tuple[Change, ...], turns: list[Message], options: dict[str, Any]
) -> tuple[list[Message], dict[str, Any], list[str]]:
    """Return turns and the template's options after all `changes`, and notes for the client on these changes."""
    for change in changes:
        turns, options = change(turns, options)
    return turns, options, [note for change, note in NOTES.items() if change in changes]
