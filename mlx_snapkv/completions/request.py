"""What a checked body asks of a model: tokens, sampler, processors, and where the answer ends."""

import secrets
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from ..engine.token_ids import require_in_vocabulary
from ..errors import OptionError, SnapKVError
from .body import Body, ChatBody
from .constraint import Constraint
from .fields import NO_LIMIT
from .grammar import Form, call_form, continued, json_form, name_of
from .prompt import Prompt, tokenised

SAMPLING = {"top_p", "top_k", "min_p", "xtc_probability", "xtc_threshold"}
# Fields that change nothing of an answer here, or are about other requests.
HARMLESS = set(
    """
    user metadata store service_tier safety_identifier client_metadata timeout prompt_cache_key
    prompt_cache_retention prompt_cache_options cache_prompt cache_control parallel_tool_calls include
    betas stream truncation inference_geo keep_alive extra_headers prediction usage include_reasoning
    max_tool_calls speed function_call add_generation_prompt
    """.split()
)
NEARLY_ZERO = 1e-6  # temperature, or top_p: below it only the likeliest token is left, and in float32 not even that
EMPTY: tuple[Any, ...] = ({}, [], "", False)
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


class Bounds(NamedTuple):
    """What a model bounds: the tokens of an answer, and of which there are logits, if fewer than the tokenizer's."""

    longest: int = sys.maxsize
    vocabulary: int = sys.maxsize


NO_BOUNDS = Bounds()


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
        warnings: sentences on what of the body is left out, without those fields.
        by_functions: whether a call is to be said as before there were tools.
        prefill: the assistant's text that the answer goes on with, and does not repeat.
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
    warnings: list[str]
    constraint: Constraint | None = None
    by_functions: bool = False
    prefill: str = ""


def completion_request(
    body: Body,
    tokenizer,
    defaults: Defaults,
    seed: int | None = None,
    bounds: Bounds = NO_BOUNDS,
    prompt: Prompt | None = None,
) -> CompletionRequest:
    """What a body asks of this tokenizer's model, within its `bounds`; `seed`, of 64 bits, if it gives none.

    `prompt` is the body's, if it is known.

    Raises: SnapKVError: as of `tokenised`, or a form can't be forced.
    """
    prompt = prompt or tokenised(body, tokenizer, bounds.vocabulary)
    tools, state, warnings = prompt.tools, prompt.state, list(prompt.warnings)
    form: Form | None = None
    if isinstance(body, ChatBody):
        form = _form(body, prompt, tokenizer)
        n_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    else:
        n_logprobs = body.logprobs
    bias = {int(token): value for token, value in (body.logit_bias or {}).items()}
    size = min(len(tokenizer), bounds.vocabulary)
    require_in_vocabulary("logit_bias", bias, size)
    penalties = body.model_dump(include=PENALTIES, exclude_none=True)
    processors = make_logits_processors(bias or None, **penalties)
    max_tokens, constraint = _at_most(body, defaults, bounds.longest), None
    if form is not None:
        constraint = Constraint(tokenizer, form, max_tokens)
        processors.append(constraint)
        warnings += [form.note] if form.note else []
    unknown = {name: value for name, value in (body.model_extra or {}).items() if value is not None}
    may_call = tools is not None and (form is None or form.kind == "json")
    warnings += _left_out(unknown, may_call)
    return CompletionRequest(
        prompt.tokens,
        max_tokens,
        _sampler(body, tokenizer, size, defaults, seed),
        processors,
        [text for text in body.stop or [] if text],
        state,
        tools,
        isinstance(body, ChatBody),
        n_logprobs,
        sorted(unknown),
        list(dict.fromkeys(warnings)),
        constraint,
        body.by_functions,
        prompt.prefill,
    )


def _left_out(unknown: dict[str, Any], may_call: bool) -> list[str]:
    """Sentences on fields that are not known here; an answer that `may_call` tools calls as many as it likes."""
    left = [
        name
        for name, value in unknown.items()
        if not (name in HARMLESS or value in EMPTY or _keeps_all(value))
    ]
    notes = [f"{name[:80]} is left out: it is not known here" for name in sorted(left)]
    if unknown.get("parallel_tool_calls") is False and may_call:
        notes.insert(0, "parallel_tool_calls is left out: an answer may call several tools")
    return notes


def _keeps_all(value: Any) -> bool:
    """Whether this is a `context_management` that asks for nothing, as Claude Code's with every request."""
    edits = value.get("edits") if isinstance(value, dict) else None
    return isinstance(edits, list) and all(
        isinstance(edit, dict) and edit.get("keep") == "all" for edit in edits
    )


def _at_most(body: Body, defaults: Defaults, longest: int) -> int:
    most = body.max_completion_tokens or body.max_tokens or defaults.max_tokens
    return longest if most == NO_LIMIT else min(most, longest)


def _form(body: ChatBody, prompt: Prompt, tokenizer) -> Form | None:
    """What the answer must be: a call that `tool_choice` forces, or else what `response_format` says."""
    choice, tools, state = prompt.choice, prompt.tools, prompt.state
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
    what = "response_format's schema"
    form = json_form(schema, tokenizer, state, what, may_call=bool(tools))
    return form if state == "reasoning" else continued(form, prompt.prefill, tokenizer)


def _sampler(
    body: Body, tokenizer, size: int, defaults: Defaults, seed: int | None
) -> Callable | None:
    how = vars(defaults) | body.model_dump(include=SAMPLING, exclude_none=True)
    del how["max_tokens"]
    if body.temperature is not None:
        how["temp"] = body.temperature
    if how["top_k"] >= size:
        raise OptionError("top_k", f"less than the vocabulary's {size}", how["top_k"])
    is_greedy = body.top_p is not None and body.top_p < NEARLY_ZERO
    if how["temp"] < NEARLY_ZERO or is_greedy:
        return None
    found = (*tokenizer.encode("\n"), *tokenizer.eos_token_ids)
    special = [token for token in found if token < size]
    fixed_seed = body.seed if body.seed is not None else seed
    chosen = secrets.randbits(64) if fixed_seed is None else fixed_seed % 2**64
    draws = 2 if how["xtc_probability"] > 0 else 1
    return SeededSampler(make_sampler(**how, xtc_special_tokens=special), chosen, draws)


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
