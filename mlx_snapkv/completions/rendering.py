"""Render a chat with the model's chat template, and find the state in which the answer starts."""

import functools
import inspect
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..engine.token_ids import common_prefix
from ..errors import SnapKVError
from .chat_template import apply_template, converting_template_errors
from .messages import Message
from .prefill import continued_text, ends_in_thoughts, prefill_of, without_empty_answer
from .rewrites import REWRITES, make_alternating, rewrite
from .turns import for_template, merge_into_turns

# Options of `apply_chat_template` that change the type of its result.
RESERVED = ("tokenize", "return_dict", "return_tensors", "return_assistant_tokens_mask")
# Options that `render` handles itself, so a client's values are dropped.
OWN_OPTIONS = ("tools", "messages", "conversation", "continue_final_message")
LONG_GENERATION_PROMPT = 8  # number of tokens; few generation prompts are longer
NOT_TOKENS = "chat_template_kwargs must leave the prompt a list of tokens"


@dataclass(frozen=True)
class Rendered:
    """A rendered chat.

    Attributes:
        tokens: the prompt's token ids.
        messages: messages as passed to the template.
        options: options as passed to the template.
        notes: sentences about parts of the chat that were omitted or rewritten.
        prefill: text at the end of the prompt that the answer continues.
    """

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
    may_continue: bool = False,
) -> Rendered:
    """Render messages with the first rewrite in `REWRITES` that the template accepts.

    Args:
        tokenizer: the model's tokenizer.
        messages: the chat's messages.
        tools: tools in OpenAI's format, or None.
        options: template variables.
        may_continue: whether the answer continues the text of a final assistant message, if there is one.

    Raises: SnapKVError: there is no template, the template does not support `tools`, an option is reserved, or every
        rewrite fails. If every rewrite fails, the first rewrite's error is raised.
    """
    _require_renderable(tokenizer, tools, options)
    options = {name: value for name, value in options.items() if name not in OWN_OPTIONS}
    if tools:
        options["tools"] = tools
    turns, empty_answer_notes = without_empty_answer(merge_into_turns(messages))
    prefill = prefill_of(turns) if may_continue else ""
    must_write_calls_as_text = _drops_calls(tokenizer, turns)
    first_refusal: SnapKVError | None = None
    for changes in REWRITES:
        if must_write_calls_as_text and make_alternating not in changes:
            continue
        new_turns, new_options, rewrite_notes = rewrite(changes, turns, options)
        new_messages = [for_template(turn) for turn in new_turns]
        try:
            tokens = _template_tokens(tokenizer, new_messages, new_options, prefill)
        except SnapKVError as refusal:
            first_refusal = first_refusal or refusal
            no_rewrite_helps = isinstance(refusal.__cause__, (UnicodeError, RecursionError))
            if no_rewrite_helps:
                break
            continue
        if not isinstance(tokens, list):
            raise SnapKVError(NOT_TOKENS)
        return Rendered(
            tokens=tokens,
            messages=new_messages,
            options=new_options,
            notes=(*empty_answer_notes, *rewrite_notes),
            prefill=prefill,
        )
    assert first_refusal is not None
    raise first_refusal


def _require_renderable(tokenizer, tools: Any, options: dict[str, Any]) -> None:
    """Check the chat template, the tools and the options.

    Raises: SnapKVError: there is no template, the template does not support `tools`, or an option is reserved.
    """
    if not tokenizer.has_chat_template:
        raise SnapKVError("this model has no chat template: use /v1/completions")
    if tools and not tokenizer.has_tool_calling:
        raise SnapKVError("this model's chat template takes no tools: drop them")
    if any(name in options for name in RESERVED):
        raise SnapKVError(NOT_TOKENS)


def _template_tokens(
    tokenizer, messages: list[dict[str, Any]], options: dict[str, Any], prefill: str
) -> Any:
    """Return the chat's token ids, which end with the last message's text if it is a prefill."""
    if not prefill:
        return apply_template(tokenizer, messages, **options)
    text = continued_text(tokenizer, messages, options)
    with converting_template_errors():
        return tokenizer.encode(text, add_special_tokens=False)


def _drops_calls(tokenizer, turns: list[Message]) -> bool:
    """Return whether the template never reads `tool_calls`, and so would silently omit the chat's calls."""
    template = tokenizer.chat_template
    # mlx-lm's own templates are functions, which can't be searched.
    is_function = tokenizer._chat_template is not None
    if is_function or not isinstance(template, str):
        return False
    return "tool_calls" not in template and any(turn.calls for turn in turns)


def initial_state(tokenizer, rendered: Rendered) -> str:
    """Return the state of mlx-lm's `TextStateMachine` in which the answer starts: "normal" or "reasoning".

    If there is a prefill, the state depends on whether the prefill ends inside reasoning. Otherwise, it is the
    tokenizer's `response_initial_state`. If the tokenizer has none, the generation prompt decides.
    """
    if rendered.prefill:
        starts_reasoning = tokenizer.has_thinking and ends_in_thoughts(rendered.prefill, tokenizer)
    elif tokenizer.response_initial_state:
        return tokenizer.response_initial_state
    else:
        starts_reasoning = _generation_prompt_starts_reasoning(tokenizer, rendered)
    return "reasoning" if starts_reasoning else "normal"


def _generation_prompt_starts_reasoning(tokenizer, rendered: Rendered) -> bool:
    """Return whether the generation prompt at the end of a rendered chat starts reasoning."""
    if not tokenizer.has_thinking:
        return False
    tokens = rendered.tokens
    if tokenizer.rfind_think_start(tokens) <= tokenizer.rfind_think_end(tokens):
        return False
    # Messages may contain the marker as text, so check only the generation prompt.
    return ends_in_thoughts(_generation_prompt(tokenizer, rendered), tokenizer)


def _generation_prompt(tokenizer, rendered: Rendered) -> str:
    """Return the text that the template adds after the last message to start the answer."""

    def render_text(messages: list[dict[str, Any]], **options: Any) -> str:
        return apply_template(tokenizer, messages, tokenize=False, **rendered.options | options)

    *earlier, last = rendered.messages
    try:
        chat = render_text(rendered.messages)
        without_prompt = render_text(rendered.messages, add_generation_prompt=False)
        if without_prompt != chat and chat.startswith(without_prompt):
            return chat.removeprefix(without_prompt)
        # This template ignores `add_generation_prompt`. Its generation prompt is the suffix that stays the same when
        # the last message changes.
        changed_last = last | {"content": "\u00a4"}
        other_chat = render_text([*earlier, changed_last])
    except SnapKVError:  # the template rejects one of these chats
        last_tokens = rendered.tokens[-LONG_GENERATION_PROMPT:]
        return tokenizer.decode(last_tokens)
    return _common_suffix(chat, other_chat)


def _common_suffix(first: str, second: str) -> str:
    """Return the longest common suffix of two strings."""
    length = common_prefix([first[::-1], second[::-1]])
    return first[len(first) - length :]


def template_variables(tokenizer) -> set[str]:
    """Return the names of the variables that a tokenizer's chat template reads."""
    template_function = tokenizer._chat_template  # mlx-lm's own template, or None
    names: set[str] = set()
    if template_function is not None:
        names |= set(inspect.signature(template_function).parameters)
    template = tokenizer.chat_template
    # Some tokenizers have several named templates, such as "tool_use".
    templates = template.values() if isinstance(template, dict) else [template]
    for source in templates:
        names |= _variables_in(source or "")
    return names


@functools.cache
def _variables_in(template: str) -> frozenset[str]:
    """Return the variables in a template, or all words in the template if it can't be parsed.

    Some templates use syntax that only transformers supports.
    """
    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    try:
        return frozenset(find_undeclared_variables(environment.parse(template)))
    except TemplateError:
        return frozenset(re.findall(r"\w+", template))
