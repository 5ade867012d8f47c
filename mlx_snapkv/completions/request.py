"""Build completion requests from validated bodies: tokens, sampler, logits processors and stop strings."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from mlx_lm.sample_utils import make_logits_processors

from ..engine.token_ids import require_in_vocabulary
from ..errors import SnapKVError
from ..models.counts import vocabulary_size
from ..models.trained_length import trained_length
from .body import Body, ChatBody, Defaults
from .constraint import Constraint
from .contents import replace_surrogates
from .fields import NO_LIMIT
from .grammar import AnswerFormat, continue_json, json_format, tool_call_format, tool_name
from .prompt import Prompt, tokenize
from .sampler import make_sampler
from .tool_choice import ToolChoice

# Unknown fields that need no warning, because ignoring them does not change the answer.
FIELDS_WITHOUT_EFFECT = set(
    """
    user metadata store service_tier safety_identifier client_metadata timeout prompt_cache_key
    prompt_cache_retention prompt_cache_options cache_prompt cache_control parallel_tool_calls include
    betas truncation inference_geo keep_alive extra_headers prediction usage include_reasoning
    max_tool_calls speed add_generation_prompt
    """.split()
)
MAX_FIELD_LENGTH = 80  # maximum length of an unknown field's name in a warning, in characters
PENALTY_FIELDS = {
    f"{name}_{field}"
    for name in ("repetition", "presence", "frequency")
    for field in ("penalty", "context_size")
}
# Maximum answer length in tokens for models whose configuration has no trained length.
DEFAULT_MAX_ANSWER = 1 << 20


class Bounds(NamedTuple):
    """A model's limits.

    Attributes:
        max_tokens: maximum answer length in tokens.
        vocabulary_size: number of token embeddings. The tokenizer may have more tokens.
    """

    max_tokens: int = sys.maxsize
    vocabulary_size: int = sys.maxsize

    @classmethod
    def of_model(cls, model) -> Bounds:
        """Return a model's limits."""
        max_tokens = trained_length(model) or DEFAULT_MAX_ANSWER
        return cls(max_tokens, vocabulary_size(model))


NO_BOUNDS = Bounds()


@dataclass(frozen=True)
class CompletionRequest:
    """A request that is ready to join a batch.

    Attributes:
        prompt: token ids.
        sampler: the sampler, or None for greedy decoding.
        processors: logits processors in mlx-lm's order, followed by the constraint, if any.
        stop: strings that end the answer and are not part of it.
        initial_state: state of mlx-lm's `TextStateMachine` at the start of the answer, "normal" or "reasoning".
        tools: the tools in the chat template, in OpenAI's format, or None if no tool may be called.
        chat: whether the answer is a chat message rather than a text completion.
        n_logprobs: number of most likely tokens to report at each position, in addition to the log-probability of the
            answer token. None if no log-probabilities are reported.
        ignored: names of unknown fields in the body.
        warnings: messages about parts of the body that are ignored.
        constraint: enforces a schema or a tool call, if the body requires one.
        uses_functions: whether the client expects a `function_call`, the predecessor of `tool_calls`.
        prefill: assistant text that the answer continues without repeating it.
    """

    prompt: list[int]
    max_tokens: int
    sampler: Callable | None
    processors: list[Callable]
    stop: list[str]
    initial_state: str
    tools: list[dict[str, Any]] | None
    chat: bool
    n_logprobs: int | None
    ignored: list[str]
    warnings: list[str]
    constraint: Constraint | None = None
    uses_functions: bool = False
    prefill: str = ""


def completion_request(
    body: Body,
    tokenizer,
    defaults: Defaults,
    seed: int = 0,
    bounds: Bounds = NO_BOUNDS,
    prompt: Prompt | None = None,
) -> CompletionRequest:
    """Build the request for a body.

    Args:
        body: the body of a chat or text completion.
        tokenizer: the model's tokenizer.
        defaults: values for fields that the body omits.
        seed: 64-bit seed, used if the body has none.
        bounds: the model's limits.
        prompt: the body's prompt, if already tokenised.

    Raises: SnapKVError: `tokenize` fails, `logit_bias` or `top_k` does not fit the vocabulary, the required answer
        format can't be enforced, or `max_tokens` is too small for the required JSON.
    """
    prompt = prompt or tokenize(body, tokenizer, bounds.vocabulary_size)
    vocabulary_size = min(len(tokenizer), bounds.vocabulary_size)
    if isinstance(body, ChatBody):
        answer_format = _answer_format(body, prompt, tokenizer)
        n_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    else:
        answer_format = None
        n_logprobs = body.logprobs
    processors = _bias_and_penalty_processors(body, vocabulary_size)
    max_tokens = _max_tokens(body, defaults, bounds)
    constraint = None
    if answer_format is not None:
        constraint = Constraint(tokenizer, answer_format, max_tokens)
        processors.append(constraint)
    extra_fields = body.model_extra or {}
    unknown_fields = {name: value for name, value in extra_fields.items() if value is not None}
    return CompletionRequest(
        prompt=prompt.tokens,
        max_tokens=max_tokens,
        sampler=make_sampler(body, tokenizer, vocabulary_size, defaults, seed),
        processors=processors,
        stop=body.stop or [],
        initial_state=prompt.initial_state,
        tools=prompt.tools,
        chat=isinstance(body, ChatBody),
        n_logprobs=n_logprobs,
        ignored=sorted(unknown_fields),
        warnings=_warnings(body, prompt, answer_format, unknown_fields),
        constraint=constraint,
        uses_functions=body.uses_functions,
        prefill=prompt.prefill,
    )


def _bias_and_penalty_processors(body: Body, vocabulary_size: int) -> list[Callable]:
    """Return mlx-lm's logits processors for a body's bias and penalties.

    Raises: SnapKVError: a token in `logit_bias` is outside the vocabulary.
    """
    bias = {int(token): value for token, value in (body.logit_bias or {}).items()}
    require_in_vocabulary("logit_bias", bias, vocabulary_size)
    penalties = body.model_dump(include=PENALTY_FIELDS, exclude_none=True)
    return make_logits_processors(bias or None, **penalties)


def _warnings(
    body: Body, prompt: Prompt, answer_format: AnswerFormat | None, unknown_fields: dict[str, Any]
) -> list[str]:
    """Return sentences that tell the client which parts of a body are ignored, changed or not enforced.

    Ignored fields that would not change the answer anyway are not mentioned. `unknown_fields` maps the names of the
    body's unknown fields to their values.
    """
    warnings = list(prompt.warnings)
    if answer_format is not None and answer_format.note:
        warnings.append(answer_format.note)
    forces_call = answer_format is not None and answer_format.kind != "json"
    may_call_several = prompt.tools is not None and not forces_call
    if unknown_fields.get("parallel_tool_calls") is False and may_call_several:
        warnings.append("parallel_tool_calls is left out: an answer may call several tools")
    if isinstance(body, ChatBody) and body.top_logprobs and not body.logprobs:
        warnings.append("top_logprobs is left out: logprobs is not true")
    for name, value in sorted(unknown_fields.items()):
        has_no_effect = name in FIELDS_WITHOUT_EFFECT or not value or _keeps_whole_context(value)
        if not has_no_effect:
            warnings.append(f"{name[:MAX_FIELD_LENGTH]} is left out: it is not known here")
    return list(dict.fromkeys(map(replace_surrogates, warnings)))


def _keeps_whole_context(value: Any) -> bool:
    """Return whether a value is a `context_management` object that keeps the whole context.

    Claude Code sends such an object with every request.
    """
    edits = value.get("edits") if isinstance(value, dict) else None
    if not isinstance(edits, list):
        return False
    return all(isinstance(edit, dict) and edit.get("keep") == "all" for edit in edits)


def _max_tokens(body: Body, defaults: Defaults, bounds: Bounds) -> int:
    """Return the maximum answer length in tokens: the body's or the default, capped at the model's limit."""
    max_tokens = body.max_completion_tokens or body.max_tokens or defaults.max_tokens
    if max_tokens == NO_LIMIT:
        return bounds.max_tokens
    return min(max_tokens, bounds.max_tokens)


def _answer_format(body: ChatBody, prompt: Prompt, tokenizer) -> AnswerFormat | None:
    """Return the format that the answer must have, or None if any text is allowed.

    If `tool_choice` forces a call, it is the format of that call. Otherwise, it is the format of the JSON that
    `response_format` requires.

    Raises: SnapKVError: there is no tool for a forced call, or a schema can't be enforced.
    """
    state = prompt.initial_state
    choice = prompt.tool_choice
    if choice is not None and choice.type in ("required", "function"):
        tools = _callable_tools(prompt.tools or [], choice)
        return tool_call_format(tools, tokenizer, state)
    schema = None if body.response_format is None else body.response_format.schema_to_enforce
    if schema is None:
        return None
    answer_format = json_format(
        schema, tokenizer, state, "response_format's schema", may_call=bool(prompt.tools)
    )
    if state == "reasoning":  # the prefill is part of the reasoning, not of the JSON
        return answer_format
    return continue_json(answer_format, prompt.prefill, tokenizer)


def _callable_tools(tools: list[dict[str, Any]], choice: ToolChoice) -> list[dict[str, Any]]:
    """Return the tools that a forced choice allows: the named tool, or all tools.

    Raises: SnapKVError: there is no such tool, or a tool has no name.
    """
    if choice.function is not None:
        name = choice.function.name
        tools = [tool for tool in tools if tool_name(tool) == name]
        if not tools:
            raise SnapKVError(f"tool_choice asks for {name!r}, which is none of the tools")
    if not tools:
        raise SnapKVError("tool_choice asks for a call, but there are no tools")
    return tools
