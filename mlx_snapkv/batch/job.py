"""One request of a batch, up to the compression of its prompt."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from ..caches.layers import attention_layers, is_compressed, members
from ..caches.memories import lasting_forms, plain_forms, recalling_caches, saved_forms
from ..engine.decision import gate
from ..engine.making import make_request
from ..engine.prefill import observing
from ..engine.recalling import Recall
from ..engine.report import NO_POLICY, CompressionReport
from ..engine.request import Request, held_tokens
from ..engine.serving import NO_POLICY_REASON, reason_for_nothing
from ..engine.split_calls import one_by_one
from ..entries.quantization import Quantization
from ..policies import Policy, Stages

BatchReport = Callable[[int, CompressionReport], None]


@dataclass(frozen=True)
class Plan:
    """What is to become of every prompt of a batch.

    Attributes:
        quantization: how entries kept are to be quantised, if at all.
        recall: what becomes of the others, and what answers do with them.
        on_report: receives the number of a request, and its report.
        turns: caches that hold tokens already are compressed again, as those of a conversation are, unless the policy
            reads a prompt again as a whole.
        on_recall: receives the number of a request, caches with all entries that it has read, and those tokens.
    """

    model: Any
    policy: Policy | Stages | None
    quantization: Quantization | None
    recall: Recall
    on_report: BatchReport
    on_recall: Callable[[int, list, list[int]], None]
    turns: bool = False

    def reason_for_nothing(self, n_prompt: int, prompt_cache: list, max_tokens: int) -> str | None:
        """Why a prompt is not going to be compressed; None if it is."""
        if self.policy is None:
            return NO_POLICY_REASON
        if self.turns and self.policy.stages[1].repeats is None:
            n_tokens = held_tokens(self.model, prompt_cache) + n_prompt
            goes_on = is_compressed(prompt_cache)
            return None if goes_on else gate(self.policy, n_tokens, None, max_tokens)
        options = {"prompt_cache": prompt_cache}
        return reason_for_nothing(
            self.model, self.policy, n_prompt, max_tokens, options, self.recall
        )


class Job:
    """What becomes of one prompt's cache, whatever else is in the batch: what becomes of it alone.

    Args:
        uid: mlx-lm's number of the request.
        n_prompt: tokens to read.
        prompt_cache: its cache, fresh or of earlier turns, which is left as it is.
        max_tokens: tokens that will be generated, at most.

    Attributes:
        caches: what mlx-lm is to be handed; they become compressed.
        is_compressed: nothing more is to be done to them.
        error: what ended the request.
    """

    def __init__(self, plan: Plan, uid: int, n_prompt: int, prompt_cache: list, max_tokens: int):
        self.uid = uid
        self.error: Exception | None = None
        self._plan = plan
        self._request: Request | None = None
        self._report: CompressionReport | None = None
        self.is_compressed = False
        self._everything: list | None = None  # if it is to be recalled
        self.caches = copy.deepcopy(prompt_cache)
        try:
            self._prepare(n_prompt, max_tokens)
        except Exception as error:
            self.error = error

    def _prepare(self, n_prompt: int, max_tokens: int) -> None:
        plan = self._plan
        reason = plan.reason_for_nothing(n_prompt, self.caches, max_tokens)
        if reason is not None:
            self._report = CompressionReport(str(plan.policy or NO_POLICY), n_prompt, reason)
            self.is_compressed = True
            self.caches = plain_forms(plan.model, self.caches)
            return
        if plan.recall.memory != "drop":
            memory = plan.recall.memory, plan.policy
            self._everything = self.caches = recalling_caches(plan.model, self.caches, *memory)
        assert plan.policy is not None
        wanted = n_prompt, self.caches, plan.quantization, plan.recall
        self._request = make_request(plan.model, plan.policy, *wanted)
        self.caches = self._request.caches

    def begin(self) -> None:
        """Report, once, that the prompt is not going to be compressed."""
        report, self._report = self._report, None
        if report is not None:
            self._plan.on_report(self.uid, report)

    @property
    def model(self) -> Any:
        """The model itself."""
        return self._plan.model

    @property
    def loop_model(self) -> Any:
        """The model to read the prompt with."""
        if self._request is None:
            return one_by_one(self._plan.model, self.caches)
        return self._request.loop_model

    def step_size(self, limit: int) -> int:
        """Tokens to read at a time."""
        return limit if self._request is None else self._request.step_size(limit)

    @property
    def n_ahead(self) -> int:
        """Answer tokens that are fed before the compression, if that is still to come."""
        return 0 if self._request is None else self._request.decision.n_ahead

    @property
    def joins(self) -> bool:
        """Whether others can decode with it: it is compressed, and asks nothing of what was compressed away."""
        return self.is_compressed and self._request is None

    def before_last_token(self, tokens: list[int]) -> None:
        """The prompt but its last token has been read: compress, if that is when the policy wants it."""
        if self._request is not None and self._request.compresses_before_last_token:
            self.compress(tokens)

    def compress(self, tokens: list[int]) -> None:
        """Compress `caches`, unless they are already; `tokens` have been read."""
        if self._request is None or self.is_compressed:
            return
        report = self._request.compress()
        self.is_compressed = True
        recall = self._plan.recall
        if recall.verify is None:  # which goes on reading into them
            self._tell_recalled(tokens)
        if not recall.asks:
            self._request.end()
            self._request = None
        self._plan.on_report(self.uid, report)

    def end(self, tokens: list[int]) -> None:
        """The answer has ended, or nobody wants it any more; `tokens` have been read."""
        request, self._request = self._request, None
        if request is not None and self.is_compressed:
            request.end()
            self._tell_recalled(tokens)

    def _tell_recalled(self, tokens: list[int]) -> None:
        """Tell of the caches with all entries, once, unless a call of the model was broken off."""
        everything, self._everything = self._everything, None
        if everything is None:
            return
        model, memory = self._plan.model, self._plan.recall.memory
        (n, *more) = {
            layer.entries_in(everything).offset for layer in attention_layers(model, everything)
        }
        if not more:
            lasting = lasting_forms(model, everything, memory)
            self._plan.on_recall(self.uid, lasting, list(tokens[:n]))

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Patch the model's attention classes for the block if anybody asks for queries."""
        request = self._request
        if request is None:
            patched = observing(self._plan.model, self.caches)
        else:
            patched = request.recording_answer() if self.is_compressed else request.recording()
        with patched:
            yield

    def extracted(self) -> list:
        """The caches as they are, for others to go on with."""
        caches = saved_forms(self._plan.model, copy.deepcopy(self.caches))
        for cache in members(caches):
            if isinstance(cache, KVCache) and cache.offset:
                # Without the room that there is for the rest of the prompt.
                cache.keys, cache.values = map(mx.contiguous, cache.keys_and_values())
        mx.eval([cache.state for cache in caches])
        return caches
