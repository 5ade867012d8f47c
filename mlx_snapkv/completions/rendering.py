"""A client's chat as the model's template has it: tokens, where the answer begins, and what the template can't take."""

import functools
import inspect
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from jinja2 import TemplateError
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import SnapKVError
from .chat_template import apply_template, template_failures
from .messages import Message
from .prefill import continued_text, prefill_of, thinks_at_end, without_empty
from .rewrites import NOTES, REWRITES, alternating
from .turns import for_template, in_turns

RESERVED = ("tokenize", "return_dict", "return_tensors", "return_assistant_tokens_mask")
NO_ARRAY = "chat_template_kwargs must leave the prompt a list of tokens"


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
    """Return what the template makes of messages, with the first of `REWRITES` that it accepts.

    The answer goes on with an assistant's text at the end if it `continues`.

    Raises: SnapKVError: it refuses all the same, or there is none.
    """
    if not tokenizer.has_chat_template:
        raise SnapKVError("this model has no chat template: use /v1/completions")
    if tools and not tokenizer.has_tool_calling:
        raise SnapKVError("this model's chat template takes no tools: drop them")
    if any(name in options for name in RESERVED):
        raise SnapKVError(NO_ARRAY)
    given_tools = {"tools": tools} if tools else {}
    ours = ("tools", "continue_final_message")
    options = {name: value for name, value in options.items() if name not in ours} | given_tools
    turns, left_out = without_empty(in_turns(messages))
    prefill = prefill_of(turns) if continues else ""
    refusal: SnapKVError | None = None
    for changes in REWRITES:
        if _drops_calls(tokenizer, turns) and alternating not in changes:
            continue
        changed, how = turns, options
        for change in changes:
            changed, how = change(changed, how)
        for_model = [for_template(message) for message in changed]
        try:
            tokens = _tokens(tokenizer, for_model, how, prefill)
        except SnapKVError as error:
            refusal = refusal or error
            if isinstance(error.__cause__, (UnicodeError, RecursionError)):
                break
            continue
        if not isinstance(tokens, list):
            raise SnapKVError(NO_ARRAY)
        notes = tuple(note for change, note in NOTES.items() if change in changes)
        return Rendered(tokens, for_model, how, (*left_out, *notes), prefill)
    assert refusal is not None
    raise refusal


def _tokens(
    tokenizer, messages: list[dict[str, Any]], options: dict[str, Any], prefill: str
) -> Any:
    """Return the token ids of messages, the last of which goes on if there is a `prefill`."""
    if not prefill:
        return apply_template(tokenizer, messages, **options)
    text = continued_text(tokenizer, messages, options)
    with template_failures():
        return tokenizer.encode(text, add_special_tokens=False)


def _drops_calls(tokenizer, turns: list[Message]) -> bool:
    """Whether there are calls, and the template has no word for them: it would leave them out in silence."""
    template = tokenizer.chat_template
    is_text = isinstance(template, str) and getattr(tokenizer, "_chat_template", None) is None
    return is_text and "tool_calls" not in template and any(turn.calls for turn in turns)


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
        return apply_template(tokenizer, messages, tokenize=False, **rendered.options | options)

    *before, last = rendered.messages
    try:
        whole = text(rendered.messages)
        without = text(rendered.messages, add_generation_prompt=False)
        if without != whole and whole.startswith(without):
            return whole[len(without) :]
        # The template always ends so; what stays the same with another last message is its own.
        other = text([*before, last | {"content": "\u00a4"}])
    except SnapKVError:  # it may refuse a message that it need not have
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
