"""Draft models: mlx-lm's speculative decoding, on a main cache that was compressed.

mlx-lm's speculative loop copies the list of caches that it is handed, so the cut can't be made inside it. The main
model therefore reads the prompt and says its first tokens alone, as without a draft, until its cache is cut, and
mlx-lm's speculative loop goes on from there: the greedy answer is the one without a draft, token for token.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
from mlx_lm.generate import GenerationResponse
from mlx_lm.models.cache import KVCache, make_prompt_cache, trim_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..caches.layers import attention_layers, members
from ..caches.self_evicting import SelfEvicting
from ..errors import SnapKVError
from ..policies import Policy, Stages
from .prefill import mlx_generate, read
from .report import CompressionReport
from .split_calls import WrappedModel

NUM_DRAFT_TOKENS = 2  # mlx-lm's own default

Serve = Callable[..., Iterator[GenerationResponse]]


class DraftedRequest:
    """One request with a policy and a draft model.

    Args:
        model, draft_model: mlx-lm models of one vocabulary.
        prompt: `(T,)` token ids.
        policy: what the main model keeps; the draft model keeps everything.
        options: mlx-lm's, as for its `stream_generate`; `prompt_cache` holds the main model's caches, then the draft's.

    Raises:
        SnapKVError: a model's layers can't take tokens back, or the policy's rows would depend on the drafts.
    """

    def __init__(
        self,
        model,
        draft_model,
        tokenizer,
        prompt: mx.array,
        max_tokens: int,
        policy: Policy | Stages,
        options: dict[str, Any],
    ):
        if options.get("kv_bits") is not None:
            raise SnapKVError("a draft model can't check quantised rows exactly: drop kv_bits")
        if max_tokens < 0:
            raise SnapKVError(f"max_tokens must be at least 1 with a draft model, got {max_tokens}")
        self._model = model
        self._draft_model = draft_model
        self._tokenizer = OneText(tokenizer)
        self._prompt = prompt
        self._max_tokens = max_tokens
        self._options = options
        self._given = options.get("prompt_cache")
        self._main, self._draft = _split(self._given, model, draft_model)
        _require_rewindable("main", model, self._main)
        _require_rewindable("draft", draft_model, self._draft)
        n_layers = sum(1 for _ in attention_layers(model, self._main))
        num_draft = options.get("num_draft_tokens", NUM_DRAFT_TOKENS)
        _require_exact(policy, len(prompt), n_layers, num_draft)

    def responses(
        self, serve: Serve, n_alone: int, on_report: Callable[[CompressionReport], None] | None
    ) -> Iterator[GenerationResponse]:
        """The whole answer.

        Args:
            serve: `serve(tokenizer, options, on_report)` is the same request without a draft.
            n_alone: tokens of the answer that the cache holds when it is cut.
        """

        def cut(report: CompressionReport) -> None:
            if self._given is not None:
                self._given[:] = self._main + self._draft
            if on_report is not None:
                on_report(report)

        options = {k: v for k, v in self._options.items() if k != "num_draft_tokens"}
        options["prompt_cache"] = self._main
        return self._in_turn(serve(self._tokenizer, options, cut), n_alone + 1)

    def _in_turn(
        self, alone: Iterator[GenerationResponse], n_alone: int
    ) -> Iterator[GenerationResponse]:
        started = time.perf_counter()
        self._draft_reads(self._prompt)
        draft_seconds = time.perf_counter() - started
        said: list[GenerationResponse] = []
        with contextlib.closing(alone):  # type: ignore[type-var]
            for response in itertools.islice(alone, n_alone):
                seconds = draft_seconds + response.prompt_tokens / response.prompt_tps
                prompt_tps = response.prompt_tokens / seconds
                said.append(dataclasses.replace(response, prompt_tps=prompt_tps))
                yield said[-1]
        if said[-1].finish_reason is None:
            yield from self._together(said)

    def _together(self, said: list[GenerationResponse]) -> Iterator[GenerationResponse]:
        """mlx-lm's speculative loop from the last token said, with the figures of the whole answer."""
        tokens = [response.token for response in said]
        trim_prompt_cache(self._main, 1)  # mlx-lm's loop had run one step ahead
        started = time.perf_counter()
        if len(tokens) > 1:
            self._draft_reads(mx.array(tokens[:-1]))
        rest = mlx_generate.stream_generate(
            ExactChecks(self._model),
            self._tokenizer,
            mx.array(tokens[-1:]),
            self._max_tokens - len(tokens),
            self._draft_model,
            **self._options | {
                "prompt_cache": self._main + self._draft,
                "logits_processors": self._processors(tokens[:-1]),
            },
        )  # fmt: skip
        before = said[-1].generation_tokens / said[-1].generation_tps
        for response in rest:
            n = len(tokens) + response.generation_tokens
            yield dataclasses.replace(
                response,
                prompt_tokens=said[-1].prompt_tokens,
                prompt_tps=said[-1].prompt_tps,
                generation_tokens=n,
                generation_tps=n / (before + time.perf_counter() - started),
            )

    def _draft_reads(self, tokens: mx.array) -> None:
        step = self._options.get("prefill_step_size")
        read(
            self._draft_model,
            tokens,
            self._draft,
            {} if step is None else {"prefill_step_size": step},
        )

    def _processors(self, said: list[int]) -> list[Callable] | None:
        """The logits processors, told also of the tokens before those that the speculative loop sees."""
        before = mx.concatenate([self._prompt, mx.array(said, self._prompt.dtype)])

        def of_all(processor: Callable) -> Callable:
            return lambda tokens, logits: processor(mx.concatenate([before, tokens]), logits)

        return [of_all(p) for p in self._options.get("logits_processors") or []] or None


def require_trimmable(model, prompt_cache: list | None) -> None:
    """Refuse what mlx-lm's speculative loop would refuse, policy or not, but before the prompt is read.

    Raises:
        SnapKVError: a layer can't take tokens back, or evicts by itself.
    """
    caches = make_prompt_cache(model) if prompt_cache is None else prompt_cache
    caches = caches[: len(model.layers)]
    kinds = {type(c).__name__ for c in members(caches) if not c.is_trimmable()}
    if kinds:
        raise _cannot_rewind("main", model, kinds)
    if any(isinstance(c, SelfEvicting) for c in members(caches)):
        raise SnapKVError(
            "a prompt cache that chooses rows by itself can't go on with a draft model: drop draft_model, or "
            "compress the prompt with snapkv and on_full=slide"
        )


def _require_rewindable(role: str, model, prompt_cache: list) -> None:
    kinds = {type(c).__name__ for c in members(prompt_cache) if type(c) is not KVCache}
    if kinds:
        raise _cannot_rewind(role, model, kinds)


def _cannot_rewind(role: str, model, kinds: set[str]) -> SnapKVError:
    name = getattr(model, "model_type", type(model).__name__)
    return SnapKVError(
        f"a draft model needs layers that can take rejected tokens back, and the {role} model's ({name}) "
        f"can't where they hold {' and '.join(sorted(kinds))}: drop draft_model or use another model"
    )


def _require_exact(policy: Policy | Stages, n_prompt: int, n_layers: int, num_draft: int) -> None:
    """Refuse policies whose rows would not be those of decoding token by token."""
    _, answering = policy.stages
    quotas = answering.quotas(n_prompt, n_layers)
    if answering.mass is not None or len({quota.rows for quota in quotas}) > 1:
        raise SnapKVError(
            "a draft model needs a policy that keeps equally many rows in every layer: "
            "give a number or a share, or drop draft_model"
        )
    if answering.schedule == "once" and answering.on_full in ("slide", "grow"):
        return
    if answering.observes_answer:
        way = "schedule=block" if answering.schedule == "block" else f"on_full={answering.on_full}"
        raise SnapKVError(
            f"{answering.name} with {way} lets every answer token vote, which rejected drafts can't take back: "
            "use schedule=once with another on_full, or drop draft_model"
        )
    if num_draft >= answering.answer_block:
        raise SnapKVError(
            f"num_draft_tokens must be below the {answering.answer_block} tokens that the policy takes in "
            f"between two evictions, got {num_draft}"
        )


def _split(given: list | None, model, draft_model) -> tuple[list, list]:
    """Fresh caches of the main and of the draft model, of the kinds that the caller wants."""
    n = len(model.layers)
    main, draft = make_prompt_cache(model), make_prompt_cache(draft_model)
    if given is None:
        return main, draft
    if len(given) != n + len(draft):
        raise SnapKVError(
            f"prompt_cache must hold the caches of both models, {n} + {len(draft)}, got {len(given)}"
        )
    return given[:n], copy.deepcopy(given[n:])


class OneText(TokenizerWrapper):
    """A tokenizer whose detokenizer goes on with its text from one call of mlx-lm to the next."""

    def __init__(self, tokenizer):
        wrapped = (
            tokenizer if isinstance(tokenizer, TokenizerWrapper) else TokenizerWrapper(tokenizer)
        )
        vars(self).update(vars(wrapped))
        self._one = wrapped.detokenizer

    @property
    def detokenizer(self):
        return self._one


class ExactChecks(WrappedModel):
    """A model that checks drafts as if they came token by token, on caches that evict by themselves.

    Such a cache evicts when it is full, never sooner. A call that would cross that point is made in two pieces
    with the eviction between them, which the cache takes back if the drafts before it are rejected.
    """

    def __call__(self, inputs: mx.array, cache: list, **kwargs: Any) -> mx.array:
        """Logits `(B, L, vocab_size)` of tokens `(B, L)`."""
        model = self["wrapped"]
        caches = [c for c in members(cache) if isinstance(c, SelfEvicting)]
        for c in caches:
            c.settle()
        room = min((c.room for c in caches), default=0)
        if not 0 < room < inputs.shape[1]:
            return model(inputs, cache=cache, **kwargs)
        before = model(inputs[:, :room], cache=cache, **kwargs)
        for c in caches:
            c.evict_for_now()
        after = model(inputs[:, room:], cache=cache, **kwargs)
        return mx.concatenate([before, after], axis=1)
