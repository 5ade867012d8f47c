"""Speculative decoding with a draft model and a compressed main cache.

mlx-lm's speculative loop copies the list of caches it is given, so the caches can't be replaced while it runs. The main
model's cache must therefore be compressed before the loop starts: until then, the main model decodes alone. With greedy
sampling, the answer is the same as without a draft model, token for token.
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
        options: mlx-lm's keyword arguments. `prompt_cache` has the main model's caches first, then the draft model's.

    Raises: SnapKVError: `max_tokens` is less than 1, `prompt_cache` has the wrong number of caches, or a cache can't be
        trimmed.
    """

    model: Any
    draft_model: Any
    tokenizer: Any
    prompt: mx.array
    max_tokens: int
    plan: Plan
    options: dict[str, Any]

    def __post_init__(self):
        """Split the caller's prompt cache between the two models, or create new caches, and check them."""
        if self.max_tokens < 1:
            raise SnapKVError(
                f"max_tokens must be at least 1 with a draft model, got {self.max_tokens}"
            )
        self._continued_tokenizer = ContinuedTokenizer(self.tokenizer)
        self._main_caches = make_prompt_cache(self.model)
        self._draft_caches = make_prompt_cache(self.draft_model)
        self._callers_caches = self.options.get("prompt_cache")
        if self._callers_caches is not None:
            n_main_caches = len(self.model.layers)
            n_draft_caches = len(self._draft_caches)
            if len(self._callers_caches) != n_main_caches + n_draft_caches:
                raise SnapKVError(
                    f"prompt_cache must hold the caches of both models, {n_main_caches} + {n_draft_caches}, got "
                    f"{len(self._callers_caches)}"
                )
            self._main_caches = self._callers_caches[:n_main_caches]
            self._draft_caches = copy.deepcopy(self._callers_caches[n_main_caches:])
        _require_no_untrimmable("main", self.model, _untrimmable(self._main_caches))
        _require_no_untrimmable("draft", self.draft_model, _untrimmable(self._draft_caches))

    def responses(
        self, start_answer: StartAnswer, on_report: Callable[[CompressionReport], None]
    ) -> Iterator[GenerationResponse]:
        """Yield the responses of the whole answer.

        `start_answer(tokenizer, options, on_report)` starts the answer without a draft model.
        """

        def hand_back_caches(report: CompressionReport) -> None:
            # Compression has replaced the caches in `_main_caches`, but not in the caller's list.
            if self._callers_caches is not None:
                self._callers_caches[:] = self._main_caches + self._draft_caches
            on_report(report)

        options = self.options | {"prompt_cache": self._main_caches}
        options.pop("num_draft_tokens", None)
        main_responses = start_answer(self._continued_tokenizer, options, hand_back_caches)
        return self._main_then_drafted(main_responses)

    def _main_then_drafted(
        self, main_responses: Iterator[GenerationResponse]
    ) -> Iterator[GenerationResponse]:
        """Yield the whole answer.

        The main model alone decodes the tokens before compression. mlx-lm's speculative loop decodes the rest.
        """
        started = time.perf_counter()
        self._feed_draft_model(self.prompt)
        draft_seconds = time.perf_counter() - started
        n_from_main = self.plan.n_decoded_before_compression
        responses: list[GenerationResponse] = []
        with contextlib.closing(main_responses):  # type: ignore[type-var]
            for response in itertools.islice(main_responses, n_from_main):
                main_seconds = response.prompt_tokens / response.prompt_tps
                prompt_tps = response.prompt_tokens / (draft_seconds + main_seconds)
                responses.append(dataclasses.replace(response, prompt_tps=prompt_tps))
                yield responses[-1]
        if responses[-1].finish_reason is None:
            yield from self._drafted_responses(responses)

    def _drafted_responses(self, earlier: list[GenerationResponse]) -> Iterator[GenerationResponse]:
        """Yield the rest of the answer from mlx-lm's speculative loop.

        Token counts and speeds cover the whole answer. The loop starts by feeding the last token in `earlier`, so both
        models must have read exactly the tokens before it.

        Args:
            earlier: the responses so far, decoded by the main model alone.
        """
        earlier_tokens = [response.token for response in earlier]
        *fed_tokens, last_token = earlier_tokens
        latest = earlier[-1]
        for cache in layer_caches(self._main_caches):
            cache.trim(1)  # `last_token`, which has already been fed
        started = time.perf_counter()
        if fed_tokens:
            self._feed_draft_model(mx.array(fed_tokens))
        earlier_seconds = latest.generation_tokens / latest.generation_tps
        options = self.options | {
            "prompt_cache": self._main_caches + self._draft_caches,
            "logits_processors": self._processors_after(fed_tokens),
        }
        n_more = self.max_tokens - len(earlier)
        with trimming_drafts(self._main_caches):
            for response in mlx_generate.stream_generate(
                self.model,
                self._continued_tokenizer,
                mx.array([last_token]),
                n_more,
                self.draft_model,
                **options,
            ):
                n_generated = len(earlier) + response.generation_tokens
                seconds = earlier_seconds + time.perf_counter() - started
                yield dataclasses.replace(
                    response,
                    prompt_tokens=latest.prompt_tokens,
                    prompt_tps=latest.prompt_tps,
                    generation_tokens=n_generated,
                    generation_tps=n_generated / seconds,
                )

    def _feed_draft_model(self, tokens: mx.array) -> None:
        """Feed tokens to the draft model."""
        step_size = self.options.get("prefill_step_size") or PREFILL_STEP_SIZE
        read(self.draft_model, tokens, self._draft_caches, {"prefill_step_size": step_size})

    def _processors_after(self, answer_tokens: list[int]) -> list[Callable] | None:
        """Wrap the logits processors, so that they also see the prompt and `answer_tokens`.

        Return None if there are no processors.
        """
        earlier = mx.concatenate([self.prompt, mx.array(answer_tokens, self.prompt.dtype)])

        def with_earlier_tokens(processor: Callable) -> Callable:
            return lambda tokens, logits: processor(mx.concatenate([earlier, tokens]), logits)

        processors = self.options.get("logits_processors") or []
        return [with_earlier_tokens(processor) for processor in processors] or None


def require_trimmable(model, prompt_cache: list | None) -> None:
    """Check that rejected drafts can be trimmed from all of the main model's caches. Raises: SnapKVError."""
    caches = make_prompt_cache(model) if prompt_cache is None else prompt_cache
    main_caches = caches[: len(model.layers)]
    adapted_caches = layer_caches(main_caches)  # the same caches, as `LayerCache`s
    untrimmable_caches = [
        cache
        for cache, adapted in zip(all_caches(main_caches), adapted_caches)
        if not (adapted.grows or adapted.is_compressed)
    ]
    _require_no_untrimmable("main", model, untrimmable_caches)
    if not all(adapted.grows for adapted in adapted_caches):
        raise SnapKVError(
            "a draft model can't continue from a prompt cache that evicts during decoding: drop {}, or compress the "
            "prompt with snapkv",
            Option("draft_model"),
        )


def _untrimmable(caches: list) -> list:
    """Return the caches that are not `KVCache`s. They can't always trim rejected tokens."""
    return [cache for cache in all_caches(caches) if type(cache) is not KVCache]


def _require_no_untrimmable(role: str, model, untrimmable_caches: list) -> None:
    """Check that a model has no untrimmable caches. Raises: SnapKVError."""
    if untrimmable_caches:
        class_names = " and ".join(sorted({type(cache).__name__ for cache in untrimmable_caches}))
        raise SnapKVError(
            "a draft model needs layers that can roll rejected tokens back, and the {} model ({}) has layers with {}, "
            "which can't: drop {} or use another model",
            role,
            type_of(model),
            class_names,
            Option("draft_model"),
        )


class ContinuedTokenizer(TokenizerWrapper):
    """A tokenizer that always returns the same detokenizer, so that decoded text continues across calls to mlx-lm.

    Args:
        tokenizer: a tokenizer, or an mlx-lm `TokenizerWrapper`.
    """

    detokenizer = None  # overrides mlx-lm's property, which creates a new one on every access

    def __init__(self, tokenizer):
        """Copy the tokenizer's attributes, and create one detokenizer."""
        if not isinstance(tokenizer, TokenizerWrapper):
            tokenizer = TokenizerWrapper(tokenizer)
        vars(self).update(vars(tokenizer), detokenizer=tokenizer.detokenizer)
