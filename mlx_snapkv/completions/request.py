"""What a checked body asks of a model: tokens, sampler, processors, and where the answer ends."""

import secrets
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from mlx_lm.server import process_message_content

from ..engine.generate import encode_prompt
from ..errors import SnapKVError, brief
from .body import Body, ChatBody
from .constraint import Constraint, Form, call_form, json_form, name_of

SAMPLING = {"top_p", "top_k", "min_p", "xtc_probability", "xtc_threshold"}
PENALTIES = {
    f"{name}_{field}"
    for name in ("repetition", "presence", "frequency")
    for field in ("penalty", "context_size")
}


@dataclass(frozen=True)
class Defaults:
    """The values of fields that a body leaves out, by the names of mlx-lm's flags; temperature 0 is greedy."""

    max_tokens: int = 256
    temp: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    min_tokens_to_keep: int = 1
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1


@dataclass(frozen=True)
class CompletionRequest:
    """A request ready for a batch.

    Attributes:
        prompt: token ids.
        sampler: None is greedy.
        processors: of the logits, in mlx-lm's order.
        stop: texts that end the answer, and are no part of it.
        state: of mlx-lm's `TextStateMachine` at the beginning: "normal" or "reasoning".
        chat: whether a message is answered, or a text continued.
        constraint: what forces the answer into a form, the last of the processors.
        n_logprobs: how many are wanted besides a token's own; None for not even that.
        ignored: the body's fields that are not known here.
    """

    prompt: list[int]
    max_tokens: int
    sampler: Callable | None
    processors: list[Callable]
    stop: list[str]
    state: str
    tools: list[dict[str, Any]] | None
    chat: bool
    n_logprobs: int | None
    ignored: list[str]
    constraint: Constraint | None = None


def completion_request(
    body: Body,
    tokenizer,
    defaults: Defaults,
    seed: int | None = None,
    longest: int = sys.maxsize,
    form: Form | None = None,
) -> CompletionRequest:
    """What a body asks of this tokenizer's model, `longest` tokens at most; `seed`, of 64 bits, if it gives none.

    A text that is continued may have been given a `form`.

    Raises: SnapKVError: the chat template refuses, a token is not one of the vocabulary's, or a form can't be forced.
    """
    tools, state = None, "normal"
    if isinstance(body, ChatBody):
        prompt, tools = chat_tokens(body, tokenizer), _tools(body)
        state = initial_state(tokenizer, prompt)
        form = _form(body, tools, tokenizer, state)
        n_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    else:
        prompt, n_logprobs = _text_tokens(body.prompt, tokenizer), body.logprobs
    if not prompt:
        raise SnapKVError("the prompt is empty: give some text")
    bias = {int(token): value for token, value in (body.logit_bias or {}).items()}
    _require_known("logit_bias", bias, tokenizer)
    penalties = body.model_dump(include=PENALTIES, exclude_none=True)
    processors = make_logits_processors(bias or None, **penalties)
    max_tokens = min(body.max_completion_tokens or body.max_tokens or defaults.max_tokens, longest)
    constraint = None
    if form is not None:
        constraint = Constraint(tokenizer, form, max_tokens)
        processors.append(constraint)
    return CompletionRequest(
        prompt,
        max_tokens,
        _sampler(body, tokenizer, defaults, seed),
        processors,
        [text for text in body.stop or [] if text],
        state,
        tools,
        isinstance(body, ChatBody),
        n_logprobs,
        sorted(name for name, value in (body.model_extra or {}).items() if value is not None),
        constraint,
    )


def _tools(body: ChatBody) -> list[dict[str, Any]] | None:
    is_none = body.tool_choice is not None and body.tool_choice.type == "none"
    return None if is_none else body.tools or None


def _form(body: ChatBody, tools: list[dict[str, Any]] | None, tokenizer, state: str) -> Form | None:
    """What the answer must be: a call that `tool_choice` forces, or else what `response_format` says."""
    choice = body.tool_choice
    if choice is not None and choice.type in ("required", "function"):
        if choice.function is not None:
            name = choice.function.name
            tools = [tool for tool in tools or [] if name_of(tool) == name]
            if not tools:
                raise SnapKVError(f"tool_choice asks for {name!r}, which is none of the tools")
        if not tools:
            raise SnapKVError("tool_choice asks for a call, but there are no tools")
        return call_form(tools, tokenizer, state)
    schema = None if body.response_format is None else body.response_format.schema_wanted
    if schema is None:
        return None
    return json_form(schema, tokenizer, state, "response_format's schema", may_call=bool(tools))


def chat_tokens(
    body: ChatBody, tokenizer, context: list[dict[str, Any]] | None = None
) -> list[int]:
    """The body's messages in the chat template, or some that are only a context, which is changed.

    Raises: SnapKVError: the template refuses, or there is none.
    """
    tools, messages = _tools(body), body.template_messages() if context is None else context
    if not tokenizer.has_chat_template:
        raise SnapKVError("this model has no chat template: use /v1/completions")
    if tools and not tokenizer.has_tool_calling:
        raise SnapKVError("this model's chat template takes no tools: drop them")
    options = dict(body.chat_template_kwargs or {})
    if tools:
        options["tools"] = tools
    options["add_generation_prompt"] = context is None
    try:
        process_message_content(messages)
        found = tokenizer.apply_chat_template(messages, **options)
    except Exception as error:  # templates are code of the model's authors
        raise SnapKVError(f"the chat template or tokenizer failed: {brief(error)}") from error
    if not isinstance(found, list):
        raise SnapKVError("chat_template_kwargs must leave the prompt a list of tokens")
    return found


def _text_tokens(prompt: str | list[int], tokenizer) -> list[int]:
    if isinstance(prompt, list):
        _require_known("prompt", prompt, tokenizer)
        return prompt
    try:
        return encode_prompt(tokenizer, prompt).tolist()  # type: ignore[return-value]
    except Exception as error:
        raise SnapKVError(f"the tokenizer failed: {brief(error)}") from error


def _require_known(field: str, tokens: Iterable[int], tokenizer) -> None:
    size = len(tokenizer)
    for token in tokens:
        if not 0 <= token < size:
            raise SnapKVError(f"{field} must have token ids from 0 to {size - 1}, got {token}")


def _sampler(body: Body, tokenizer, defaults: Defaults, seed: int | None) -> Callable | None:
    how = vars(defaults) | body.model_dump(include=SAMPLING, exclude_none=True)
    del how["max_tokens"]
    if body.temperature is not None:
        how["temp"] = body.temperature
    if how["top_k"] >= len(tokenizer):
        raise SnapKVError(
            f"top_k must be less than the vocabulary's {len(tokenizer)}, got {how['top_k']}"
        )
    if how["temp"] == 0:
        return None
    special = tokenizer.encode("\n") + list(tokenizer.eos_token_ids)
    own = body.seed if body.seed is not None else seed
    chosen = secrets.randbits(64) if own is None else own % 2**64
    draws = 2 if how["xtc_probability"] > 0 else 1
    return SeededSampler(make_sampler(**how, xtc_special_tokens=special), chosen, draws)


def initial_state(tokenizer, prompt: list[int]) -> str:
    """As mlx-lm's server has it: the template may have begun the model's thoughts."""
    if tokenizer.response_initial_state:
        return tokenizer.response_initial_state
    thinks = tokenizer.has_thinking and (
        tokenizer.rfind_think_start(prompt) > tokenizer.rfind_think_end(prompt)
    )
    return "reasoning" if thinks else "normal"


class SeededSampler:
    """A sampler that draws what mlx-lm's loop draws after `mx.random.seed(seed)`, whatever else a batch samples.

    Before each draw mlx's one generator is set to the state of this request's own sequence, which is computed apart:
    nothing waits for the model. `sampler` draws `draws` times for a token.
    """

    def __init__(self, sampler: Callable[[mx.array], mx.array], seed: int, draws: int):
        self._sampler = sampler
        self._key = mx.random.key(seed)
        self._draws = draws

    def __call__(self, logprobs: mx.array) -> mx.array:
        state: Any = self._key.tolist()
        high, low = state
        mx.random.seed((high << 32) | low)
        for _ in range(self._draws):
            self._key = mx.random.split(self._key, stream=mx.cpu)[0]
        return self._sampler(logprobs)
