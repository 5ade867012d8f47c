"""Rewrite chats that a template rejects, starting with the smallest change.

Templates reject what their model was not trained on: system messages, call ids in a different format, user text after a
tool result, several calls in one turn. Agents send all of these.
"""

import hashlib
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from .contents import as_json
from .messages import Message
from .turns import calls_as_text, merge_into_turns

MISTRAL_CALL_ID = re.compile("[a-zA-Z0-9]{9}")
ACKNOWLEDGEMENT = "OK."  # assistant text between a tool result and the next user message
OMITTED = "(what was said before is left out)"

Change = Callable[[list[Message]], list[Message]]


def _shorten_ids(turns: list[Message]) -> list[Message]:
    """Give calls and results nine-character ids, as Mistral's templates require. Equal ids stay equal."""

    def shorten(call_id: str) -> str:
        if MISTRAL_CALL_ID.fullmatch(call_id):
            return call_id
        return hashlib.sha256(call_id.encode(errors="replace")).hexdigest()[:9]

    def shorten_in(turn: Message) -> Message:
        calls = tuple(call | {"id": shorten(call["id"])} for call in turn.calls)
        call_id = shorten(turn.call_id) if turn.role == "tool" else ""
        return replace(turn, calls=calls, call_id=call_id)

    return [shorten_in(turn) for turn in turns]


def _give_system_to_user(turns: list[Message]) -> list[Message]:
    """Turn the system message into the first user message."""
    messages = [replace(turn, role="user") if turn.role == "system" else turn for turn in turns]
    return merge_into_turns(messages)


def _convert_arguments(turns: list[Message], as_text: bool) -> list[Message]:
    """Convert the arguments of all calls to JSON text or to objects."""

    def convert(arguments: Any) -> str | dict[str, Any]:
        if as_text:
            return arguments if isinstance(arguments, str) else as_json(arguments)
        return arguments if isinstance(arguments, dict) else {"input": arguments}

    def convert_call(call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        arguments = convert(function["arguments"])
        return call | {"function": function | {"arguments": arguments}}

    return [replace(turn, calls=tuple(map(convert_call, turn.calls))) for turn in turns]


def _drop_thoughts(turns: list[Message]) -> list[Message]:
    """Drop the reasoning of turns with calls. Some templates reject such a turn if it has both text and reasoning."""
    return [replace(turn, reasoning="") if turn.calls else turn for turn in turns]


def _split_calls(turns: list[Message]) -> list[Message]:
    """Split turns with several calls, so that each call is followed by its result.

    A result whose call is unknown goes to the first call without a result.
    """
    groups: list[list[Message]] = []  # each group is a call with its result, or one other turn
    # The calls that have no result yet. Maps each call's index in `groups` to its id.
    ids_without_result: dict[int, str] = {}
    for turn in turns:
        if turn.role != "tool":
            for message in _one_call_each(turn):
                if message.calls:
                    (call,) = message.calls
                    ids_without_result[len(groups)] = call["id"]
                groups.append([message])
            continue
        same_id = [
            index for index, call_id in ids_without_result.items() if call_id == turn.call_id
        ]
        possible_calls = same_id or list(ids_without_result)
        if not possible_calls:
            groups.append([turn])
            continue
        call_index, *_ = possible_calls
        groups[call_index].append(turn)
        del ids_without_result[call_index]
    return [message for group in groups for message in group]


def _one_call_each(turn: Message) -> list[Message]:
    """Split a turn into turns with at most one call each. The first one keeps the text and everything else."""
    first = replace(turn, calls=turn.calls[:1])
    return [first, *(Message(turn.role, calls=(call,)) for call in turn.calls[1:])]


def _acknowledge_results(turns: list[Message]) -> list[Message]:
    """Insert a short assistant turn before user turns that follow a call or a result.

    Agents put reminders after tool results, but templates such as Mistral's reject a user turn there.
    """
    new_turns: list[Message] = []
    for turn in turns:
        if turn.role == "user" and new_turns:
            last = new_turns[-1]
            if last.calls or last.role == "tool":
                new_turns.append(Message("assistant", ACKNOWLEDGEMENT))
        new_turns.append(turn)
    return new_turns


def make_alternating(turns: list[Message]) -> list[Message]:
    """Turn calls and results into text, so that user and assistant turns alternate, starting with the user."""
    new_turns = merge_into_turns(map(calls_as_text, turns))
    starts_with_system = bool(new_turns) and new_turns[0].role == "system"
    first_index = 1 if starts_with_system else 0
    if first_index < len(new_turns) and new_turns[first_index].role == "assistant":
        new_turns.insert(first_index, Message("user", OMITTED))
    return new_turns


# Each alternative is tried twice: first with the system message unchanged, then with the system message turned into a
# user message.
ALTERNATIVES: list[tuple[Change, ...]] = [
    (),
    (partial(_convert_arguments, as_text=False),),
    (partial(_convert_arguments, as_text=True),),
    (_drop_thoughts,),
    (_split_calls,),
    (_acknowledge_results,),
    (make_alternating,),
]
# The first rewrite changes nothing. All others also shorten ids, which does not change the chat's meaning.
REWRITES: list[tuple[Change, ...]] = [
    (),
    *(
        (_shorten_ids, *system, *alternative)
        for alternative in ALTERNATIVES
        for system in ((), (_give_system_to_user,))
    ),
]
NOTES = {
    _drop_thoughts: "the chat template refuses text and thoughts beside a call: the thoughts are left out",
    _give_system_to_user: "the chat template refuses this system message: the user says it instead",
    make_alternating: "the chat template takes no such calls or order of roles: calls and results are put as text",
}


def rewrite(
    changes: tuple[Change, ...], turns: list[Message], options: dict[str, Any]
) -> tuple[list[Message], dict[str, Any], list[str]]:
    """Apply `changes` to a chat's turns, and return the turns, the template options and notes for the client.

    If there are changes, the tools in the options also get the fields that they lack.
    """
    for change in changes:
        turns = change(turns)
    if changes and "tools" in options:
        options = options | {"tools": _describe_tools(options["tools"])}
    notes = [note for change, note in NOTES.items() if change in changes]
    return turns, options, notes


def _describe_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give each tool every field that templates may read. If a tool has no function, change nothing."""
    default_function = {"description": "", "parameters": {}}
    default_schema = {"type": "object", "properties": {}, "required": []}
    described_tools = []
    for tool in tools:
        if not isinstance(tool["function"], dict):
            return tools
        client_fields = {
            name: value for name, value in tool["function"].items() if value is not None
        }
        function = default_function | client_fields
        # Add the defaults only to an object, because some clients send [] for a tool without parameters.
        if isinstance(function["parameters"], dict):
            function["parameters"] = default_schema | function["parameters"]
        described_tools.append(tool | {"function": function})
    return described_tools
