"""One request of a batch, up to the compression of its prompt."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

from ..caches.memories import saved_forms
from ..engine.decision import gate
from ..engine.far import pull_for
from ..engine.prefill import observing
from ..engine.recalling import Recall
from ..engine.report import CompressionReport
from ..engine.request import Request, held_tokens
from ..engine.split_calls import one_by_one
from ..entries.quantization import Quantization
from ..policies import Policy, Stages

BatchReport = Callable[[int, CompressionReport], None]


class Job:
    """What becomes of one prompt's cache, whatever else is in the batch: what becomes of it alone.

    Args:
        uid: mlx-lm's number of the request.
        n_prompt: tokens to read.
        prompt_cache: its cache, fresh or of earlier turns.
        max_tokens: tokens that will be generated, at most.
        on_report: receives `uid` and the report.

    Attributes:
        caches: what mlx-lm is to be handed; they become compressed.
        error: what ended the request.
    """

    def __init__(
        self,
        model,
        policy: Policy | Stages,
        uid: int,
        n_prompt: int,
        prompt_cache: list,
        max_tokens: int,
        quantization: Quantization | None,
        on_report: BatchReport,
    ):
        self.uid = uid
        self.error: Exception | None = None
        self._model, self._on_report = model, on_report
        self._request: Request | None = None
        self._report: CompressionReport | None = None
        self.caches = copy.deepcopy(prompt_cache)  # as mlx-lm does, it is left as it is
        try:
            self._prepare(policy, n_prompt, max_tokens, quantization)
        except Exception as error:
            self.error = error

    def _prepare(
        self,
        policy: Policy | Stages,
        n_prompt: int,
        max_tokens: int,
        quantization: Quantization | None,
    ) -> None:
        reason = gate(policy, n_prompt, self.caches, max_tokens)
        if reason is not None:
            self._report = CompressionReport(str(policy), n_prompt, reason)
            return
        pull = pull_for(
            self._model, policy, Recall(), held_tokens(self._model, self.caches) + n_prompt
        )
        self._request = Request(self._model, policy, n_prompt, self.caches, quantization, pull)
        self.caches = self._request.caches

    def begin(self) -> None:
        """Report, once, that the prompt is not going to be compressed."""
        report, self._report = self._report, None
        if report is not None:
            self._on_report(self.uid, report)

    @property
    def loop_model(self) -> Any:
        """The model to read the prompt with."""
        return one_by_one(self._model, self.caches) if self._request is None else self._model

    def step_size(self, limit: int) -> int:
        """Tokens to read at a time."""
        return limit if self._request is None else self._request.step_size(limit)

    @property
    def n_ahead(self) -> int:
        """Answer tokens that are fed before the compression; 0 if there is none, or none to come."""
        return 0 if self._request is None else self._request.decision.n_ahead

    def before_last_token(self) -> None:
        """The prompt but its last token has been read: compress, if that is when the policy wants it."""
        if self._request is not None and self._request.compresses_before_last_token:
            self.compress()

    def compress(self) -> None:
        """Compress `caches`, unless they are already."""
        if self._request is not None:
            report = self._request.compress()
            self._request = None
            self._on_report(self.uid, report)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Patch the model's attention classes for the block if anybody asks for queries."""
        request = self._request
        with observing(self._model, self.caches) if request is None else request.recording():
            yield

    def extracted(self) -> list:
        """The caches as they are, for others to go on with."""
        return saved_forms(self._model, copy.deepcopy(self.caches))
