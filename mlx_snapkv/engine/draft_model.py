"""Draft models: mlx-lm's speculative decoding, on a main cache that was compressed.

mlx-lm's speculative loop copies the list of caches that it is handed, so the caches can't be compressed inside it. The
main model therefore reads the prompt and decodes the first tokens alone until its cache is compressed. Then mlx-lm's
loop takes over. The greedy answer is the same as without a draft model, token for token.
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

from ..caches.layers import layer_caches, members
from ..errors import Option, SnapKVError
from ..models import type_of
from ..planning.prompt_plan import PREFILL_STEP_SIZE
from ..planning.request_plan import Plan
from .loop_model import drafted
from .prefill import mlx_generate, read
from .report import CompressionReport

Serve = Callable[..., Iterator[GenerationResponse]]


@dataclass
class DraftedAnswer:
    """The answer to a request with a policy and a draft model of the same vocabulary, whose cache is not compressed.

    Attributes:
        options: mlx-lm's own; `prompt_cache` holds the main model's caches, then the draft model's.

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
        """Split the caller's prompt cache into both models' caches, and check that all can be trimmed."""
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
            _refuse(role, model, [c for c in members(caches) if type(c) is not KVCache])

    def responses(
        self, serve: Serve, on_report: Callable[[CompressionReport], None] | None
    ) -> Iterator[GenerationResponse]:
        """Yield the whole answer. `serve(tokenizer, options, on_report)` serves the request without a draft model."""

        def hand_back_caches(report: CompressionReport) -> None:
            # The compression has replaced the items of `_main`.
            if self._callers_cache is not None:
                self._callers_cache[:] = self._main + self._draft
            if on_report is not None:
                on_report(report)

        options = self.options | {"prompt_cache": self._main}
        options.pop("num_draft_tokens", None)
        return self._alone_then_drafted(serve(self._one_text, options, hand_back_caches))

    def _alone_then_drafted(
        self, alone: Iterator[GenerationResponse]
    ) -> Iterator[GenerationResponse]:
        """Yield the responses of `alone` until its cache is compressed, then those of mlx-lm's loop with drafts."""
        started = time.perf_counter()
        self._draft_reads(self.prompt)
        draft_seconds = time.perf_counter() - started
        n_alone = self.plan.n_ahead + 1
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
        """Yield the rest of the answer from mlx-lm's speculative loop, with the figures of the whole answer."""
        tokens = [response.token for response in said]
        for cache in layer_caches(self._main):
            cache.trim(1)  # mlx-lm's loop had run one step ahead
        started = time.perf_counter()
        if len(tokens) > 1:
            self._draft_reads(mx.array(tokens[:-1]))
        before = said[-1].generation_tokens / said[-1].generation_tps
        options = self.options | {
            "prompt_cache": self._main + self._draft,
            "logits_processors": self._processors(tokens[:-1]),
        }
        last = mx.array(tokens[-1:])
        n_more = self.max_tokens - len(tokens)
        prompt = {name: getattr(said[-1], name) for name in ("prompt_tokens", "prompt_tps")}
        with drafted(self._main):
            for response in mlx_generate.stream_generate(
                self.model, self._one_text, last, n_more, self.draft_model, **options
            ):
                n = len(tokens) + response.generation_tokens
                tps = n / (before + time.perf_counter() - started)
                figures = prompt | {"generation_tokens": n, "generation_tps": tps}
                yield dataclasses.replace(response, **figures)

    def _draft_reads(self, tokens: mx.array) -> None:
        step = self.options.get("prefill_step_size") or PREFILL_STEP_SIZE
        read(self.draft_model, tokens, self._draft, {"prefill_step_size": step})

    def _processors(self, said: list[int]) -> list[Callable] | None:
        before = mx.concatenate([self.prompt, mx.array(said, self.prompt.dtype)])

        def of_all(processor: Callable) -> Callable:
            return lambda tokens, logits: processor(mx.concatenate([before, tokens]), logits)

        return [of_all(p) for p in self.options.get("logits_processors") or []] or None


def require_growing(model, prompt_cache: list | None) -> None:
    """Raise SnapKVError if a cache of the main model does more than grow: rejected drafts can't be trimmed from it."""
    caches = make_prompt_cache(model) if prompt_cache is None else prompt_cache
    caches = caches[: len(model.layers)]
    pairs = list(zip(members(caches), layer_caches(caches)))
    _refuse("main", model, [c for c, ours in pairs if not (ours.grows or ours.is_compressed)])
    if not all(ours.grows for _, ours in pairs):
        raise SnapKVError(
            "a draft model can't continue from a prompt cache that evicts during decoding: drop {}, or compress the "
            "prompt with snapkv",
            Option("draft_model"),
        )


def _refuse(role: str, model, caches: list) -> None:
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
    """A tokenizer whose detokenizer continues its text from one call of mlx-lm to the next.

    Args:
        tokenizer: mlx-lm's wrapper, or the tokenizer to wrap.
    """

    detokenizer = None  # not a new one at every call, as mlx-lm's property gives

    def __init__(self, tokenizer):
        """Take over the tokenizer's attributes, and make one detokenizer."""
        if not isinstance(tokenizer, TokenizerWrapper):
            tokenizer = TokenizerWrapper(tokenizer)
        vars(self).update(vars(tokenizer), detokenizer=tokenizer.detokenizer)
