"""Speculative decoding with a draft model and a compressed main cache.

mlx-lm's speculative loop copies the list of caches it is given, so the caches can't be replaced while it runs. Instead,
the main model reads the prompt and decodes the first tokens alone. Once its cache is compressed, mlx-lm's speculative
loop takes over. With greedy sampling, the answer is the same as without a draft model, token for token.
"""

import contextlib
import copy
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.generate import GenerationResponse
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..caches.layers import all_caches, layer_caches
from ..errors import Option, SnapKVError
from ..models import type_of
from ..planning.prompt_plan import PREFILL_STEP_SIZE
from ..planning.request_plan import Plan
from .loop_model import trimming_drafts
from .prefill import mlx_generate, read
from .report import CompressionReport

StartAnswer = Callable[..., Iterator[GenerationResponse]]


@dataclass
class DraftedAnswer:
    """The answer to a request with a draft model. Only the main model's cache is compressed.

    Attributes:
        options: mlx-lm's keywords. `prompt_cache` lists the main model's caches, then the draft model's.

    Raises: SnapKVError: a layer's cache can't be trimmed.
    """

    model: Any
    draft_model: Any
    tokenizer: Any
    prompt: mx.array
    max_tokens: int
    plan: Plan
    options: dict[str, Any]

    def __post_init__(self):
        """Split the caller's prompt cache between the two models, and check that every cache can be trimmed."""
        if self.max_tokens < 1:
            raise SnapKVError(
                f"max_tokens must be at least 1 with a draft model, got {self.max_tokens}"
            )
        self._one_text = OneText(self.tokenizer)
        self._main, self._draft = make_prompt_cache(self.model), make_prompt_cache(self.draft_model)
        self._callers_cache = self.options.get("prompt_cache")
        if self._callers_cache is not None:
            n = len(self.model.layers)
            n_draft = len(self._draft)
            if len(self._callers_cache) != n + n_draft:
                raise SnapKVError(
                    f"prompt_cache must hold the caches of both models, {n} + {n_draft}, got {len(self._callers_cache)}"
                )
            self._main = self._callers_cache[:n]
            self._draft = copy.deepcopy(self._callers_cache[n:])
        both = ("main", self.model, self._main), ("draft", self.draft_model, self._draft)
        for role, model, caches in both:
            _refuse(role, model, [c for c in all_caches(caches) if type(c) is not KVCache])

    def responses(
        self, start_answer: StartAnswer, on_report: Callable[[CompressionReport], None] | None
    ) -> Iterator[GenerationResponse]:
        """Yield the responses of the whole answer.

        `start_answer(tokenizer, options, on_report)` starts the answer without a draft model.
        """

        def hand_back_caches(report: CompressionReport) -> None:
            # Compression has replaced the elements of `_main`.
            if self._callers_cache is not None:
                self._callers_cache[:] = self._main + self._draft
            if on_report is not None:
                on_report(report)

        options = self.options | {"prompt_cache": self._main}
        options.pop("num_draft_tokens", None)
        alone = start_answer(self._one_text, options, hand_back_caches)
        return self._alone_then_drafted(alone)

    def _alone_then_drafted(
        self, alone: Iterator[GenerationResponse]
    ) -> Iterator[GenerationResponse]:
        """Yield responses from `alone` until the main cache is compressed, then from the speculative loop."""
        started = time.perf_counter()
        self._draft_reads(self.prompt)
        draft_seconds = time.perf_counter() - started
        n_alone = self.plan.n_fed_before_compression + 1
        responses: list[GenerationResponse] = []
        with contextlib.closing(alone):  # type: ignore[type-var]
            for response in itertools.islice(alone, n_alone):
                seconds = draft_seconds + response.prompt_tokens / response.prompt_tps
                prompt_tps = response.prompt_tokens / seconds
                responses.append(dataclasses.replace(response, prompt_tps=prompt_tps))
                yield responses[-1]
        if responses[-1].finish_reason is None:
            yield from self._drafted(responses)

    def _drafted(self, earlier: list[GenerationResponse]) -> Iterator[GenerationResponse]:
        """Yield the rest of the answer from mlx-lm's speculative loop.

        Token counts and speeds cover the whole answer. The loop starts from the last token in `earlier`. Both models
        must have read every token before that one.

        Args:
            earlier: the responses so far, decoded by the main model alone.
        """
        tokens = [response.token for response in earlier]
        latest = earlier[-1]
        for cache in layer_caches(self._main):
            cache.trim(1)  # mlx-lm's loop has already fed one token more
        started = time.perf_counter()
        if len(tokens) > 1:
            self._draft_reads(mx.array(tokens[:-1]))
        earlier_seconds = latest.generation_tokens / latest.generation_tps
        options = self.options | {
            "prompt_cache": self._main + self._draft,
            "logits_processors": self._processors(tokens[:-1]),
        }
        last_token = mx.array(tokens[-1:])
        n_more = self.max_tokens - len(tokens)
        with trimming_drafts(self._main):
            for response in mlx_generate.stream_generate(
                self.model, self._one_text, last_token, n_more, self.draft_model, **options
            ):
                n = len(tokens) + response.generation_tokens
                yield dataclasses.replace(
                    response,
                    prompt_tokens=latest.prompt_tokens,
                    prompt_tps=latest.prompt_tps,
                    generation_tokens=n,
                    generation_tps=n / (earlier_seconds + time.perf_counter() - started),
                )

    def _draft_reads(self, tokens: mx.array) -> None:
        """Feed tokens to the draft model."""
        step = self.options.get("prefill_step_size") or PREFILL_STEP_SIZE
        read(self.draft_model, tokens, self._draft, {"prefill_step_size": step})

    def _processors(self, answer: list[int]) -> list[Callable] | None:
        """Wrap the logits processors so that they also see the prompt and the first tokens of the answer."""
        earlier = mx.concatenate([self.prompt, mx.array(answer, self.prompt.dtype)])

        def with_earlier(processor: Callable) -> Callable:
            return lambda tokens, logits: processor(mx.concatenate([earlier, tokens]), logits)

        return [with_earlier(p) for p in self.options.get("logits_processors") or []] or None


def require_growing(model, prompt_cache: list | None) -> None:
    """Check that rejected drafts can be trimmed from all of the main model's caches. Raises: SnapKVError."""
    caches = make_prompt_cache(model) if prompt_cache is None else prompt_cache
    caches = caches[: len(model.layers)]
    pairs = list(zip(all_caches(caches), layer_caches(caches)))
    _refuse("main", model, [c for c, ours in pairs if not (ours.grows or ours.is_compressed)])
    if not all(ours.grows for _, ours in pairs):
        raise SnapKVError(
            "a draft model can't continue from a prompt cache that evicts during decoding: drop {}, or compress the "
            "prompt with snapkv",
            Option("draft_model"),
        )


def _refuse(role: str, model, caches: list) -> None:
    """Raise SnapKVError if `caches`, a model's untrimmable caches, is not empty."""
    if caches:
        kinds = " and ".join(sorted({type(c).__name__ for c in caches}))
        raise SnapKVError(
            "a draft model needs layers that can roll rejected tokens back, and the {} model ({}) has layers with {}, "
            "which can't: drop {} or use another model",
            role,
            type_of(model),
            kinds,
            Option("draft_model"),
        )


class OneText(TokenizerWrapper):
    """A tokenizer with a single detokenizer, whose text continues across several calls to mlx-lm.

    Args:
        tokenizer: a tokenizer, or an mlx-lm `TokenizerWrapper`.
    """

    detokenizer = None  # overrides mlx-lm's property, which creates a new one on every access

    def __init__(self, tokenizer):
        """Copy the tokenizer's attributes, and create one detokenizer."""
        if not isinstance(tokenizer, TokenizerWrapper):
            tokenizer = TokenizerWrapper(tokenizer)
        vars(self).update(vars(tokenizer), detokenizer=tokenizer.detokenizer)
