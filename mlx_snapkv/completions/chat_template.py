"""A chat as the model's template has it: tokens, where the answer begins, and what the template can't take."""

import functools
import hashlib
import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any

from jinja2 import TemplateError
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import SnapKVError, brief
from .contents import as_json
from .messages import Message
from .prefill import continued_text, prefill_of, thinks_at_end, without_empty
from .turns import calls_as_text, for_template, in_turns

CALL_ID = re.compile("[a-zA-Z0-9]{9}")  # what Mistral's templates demand
SEEN = "OK."  # what the assistant says to a result, where a template wants it to
LEFT_OUT = "(what was said before is left out)"
RESERVED = ("tokenize", "return_dict", "return_tensors", "return_assistant_tokens_mask")
NO_ARRAY = SnapKVError("chat_template_kwargs must leave the prompt a list of tokens")


@dataclass(frozen=True)
class Rendered:
    """A chat's tokens; `options` and `messages` are what the template was given, `prefill` is what it ends with."""

    tokens: list[int]
    messages: list[dict[str, Any]]
    options: dict[str, Any]
    notes: tuple[str, ...] = ()
    prefill: str = ""


def render(
    tokenizer,
    messages: Iterable[Message],
    tools: list[dict[str, Any]] | None,
    options: dict[str, Any],
    continues: bool = False,
) -> Rendered:
    """What the template makes of messages. What it refuses is put differently, as little as will do.

    The answer goes on with an assistant's text at the end if it `continues`.

    Raises: SnapKVError: it refuses all the same, or there is none.
    """
    if not tokenizer.has_chat_template:
        raise SnapKVError("this model has no chat template: use /v1/completions")
    if tools and not tokenizer.has_tool_calling:
        raise SnapKVError("this model's chat template takes no tools: drop them")
    if any(name in options for name in RESERVED):
        raise NO_ARRAY
    refusal: Exception | None = None
    given_tools = {"tools": tools} if tools else {}
    ours = ("tools", "continue_final_message")
    options = {name: value for name, value in options.items() if name not in ours} | given_tools
    turns, left_out = without_empty(in_turns(messages))
    prefill = prefill_of(turns) if continues else ""
    for changes in WAYS:
        if _drops_calls(tokenizer, turns) and _alternating not in changes:
            continue
        changed, how = turns, options
        for change in changes:
            changed, how = change(changed, how)
        for_model = [for_template(message) for message in changed]
        try:
            if prefill:
                text = continued_text(tokenizer, for_model, how)
                tokens = tokenizer.encode(text, add_special_tokens=False)
            else:
                tokens = tokenizer.apply_chat_template(for_model, **how)
        except Exception as error:  # templates are code of the model's authors
            refusal = refusal or error
            if isinstance(error, (UnicodeError, RecursionError)):
                break
            continue
        if not isinstance(tokens, list):
            raise NO_ARRAY
        notes = tuple(note for change, note in NOTES.items() if change in changes)
        return Rendered(tokens, for_model, how, (*left_out, *notes), prefill)
    assert refusal is not None
    raise SnapKVError(f"the chat template or tokenizer failed: {brief(refusal)}") from refusal


def _drops_calls(tokenizer, turns: list[Message]) -> bool:
    """Whether there are calls, and the template has no word for them: it would leave them out in silence."""
    template = tokenizer.chat_template
    is_text = isinstance(template, str) and getattr(tokenizer, "_chat_template", None) is None
    return is_text and "tool_calls" not in template and any(turn.calls for turn in turns)


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


def _alternating(turns: list[Message], options: dict[str, Any]) -> Given:
    """Only what users and the assistant say, in turn, the user first."""
    changed = in_turns(map(calls_as_text, turns))
    n_system = len(changed) > 0 and changed[0].role == "system"
    if changed[n_system:] and changed[n_system].role == "assistant":
        changed.insert(n_system, Message("user", LEFT_OUT))
    return changed, options


_as_objects, _as_texts = partial(_arguments, as_text=False), partial(_arguments, as_text=True)
ALIKE = _short_ids, _described_tools  # which change nothing that is said
# What is changed of a chat that the template refuses, the least first.
WAYS: list[tuple[Callable[..., Given], ...]] = [
    (),
    ALIKE,
    (*ALIKE, _as_objects),
    (*ALIKE, _as_texts),
    (*ALIKE, _without_thoughts),
    (*ALIKE, _without_system),
    (*ALIKE, _without_system, _as_objects),
    (*ALIKE, _without_system, _as_texts),
    (*ALIKE, _one_call_each),
    (*ALIKE, _without_system, _one_call_each),
    (*ALIKE, _with_answers),
    (*ALIKE, _without_system, _with_answers),
    (*ALIKE, _alternating),
    (*ALIKE, _without_system, _alternating),
]
NOTES = {
    _without_thoughts: "the chat template refuses thoughts beside a call: they are left out",
    _without_system: "the chat template refuses this system message: the user says it instead",
    _alternating: "the chat template takes no such calls or order of roles: calls and results are put as text",
}


def initial_state(tokenizer, rendered: Rendered) -> str:
    """Of mlx-lm's `TextStateMachine`: the template may have begun the model's thoughts, whatever the chat says."""
    if rendered.prefill:
        thinks = tokenizer.has_thinking and thinks_at_end(rendered.prefill, tokenizer)
        return "reasoning" if thinks else "normal"
    if tokenizer.response_initial_state:
        return tokenizer.response_initial_state
    tokens = rendered.tokens
    if not tokenizer.has_thinking or (
        tokenizer.rfind_think_start(tokens) <= tokenizer.rfind_think_end(tokens)
    ):
        return "normal"
    return "reasoning" if thinks_at_end(_end(tokenizer, rendered), tokenizer) else "normal"


def _end(tokenizer, rendered: Rendered) -> str:
    """What the template puts behind the last message, to have it answered."""

    def text(messages: list[dict[str, Any]], **options: Any) -> str:
        return tokenizer.apply_chat_template(messages, tokenize=False, **rendered.options | options)

    *before, last = rendered.messages
    try:
        whole = text(rendered.messages)
        without = text(rendered.messages, add_generation_prompt=False)
        if without != whole and whole.startswith(without):
            return whole[len(without) :]
        # The template always ends so; what stays the same with another last message is its own.
        other = text([*before, last | {"content": "\u00a4"}])
    except Exception:  # it may refuse what it need not have
        return tokenizer.decode(rendered.tokens[-8:])
    pairs = zip(reversed(whole), reversed(other))
    n_same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return whole[len(whole) - n_same :]


def variables(tokenizer) -> set[str]:
    """The names that a tokenizer's template asks for."""
    custom = getattr(tokenizer, "_chat_template", None)  # mlx-lm's own code
    names = set(inspect.signature(custom).parameters) if callable(custom) else set()
    template = tokenizer.chat_template
    for text in template.values() if isinstance(template, dict) else [template]:
        names |= _variables_in(text or "")
    return names


@functools.cache
def _variables_in(template: str) -> frozenset[str]:
    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    try:
        return frozenset(find_undeclared_variables(environment.parse(template)))
    except TemplateError:  # transformers knows more than jinja: any word may be one
        return frozenset(re.findall(r"\w+", template))
