"""One request of a batch, up to the compression of its prompt."""

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from ..caches.layers import copies_but_entries, members
from ..engine.loop_model import observing, one_by_one
from ..engine.report import CompressionReport
from ..engine.request import Request, make_request
from ..planning.request_plan import Plan
from ..sparse.prompt_caches import plain_forms, saved_forms

BatchReport = Callable[[int, CompressionReport], None]


@dataclass(frozen=True)
class BatchSettings:
    """What all requests of a batch have in common; see `CompressedBatchGenerator`."""

    model: Any
    on_report: BatchReport | None
    on_read: Callable[[int, list, list[int]], None] | None


class Job:
    """One request of a batch: its prompt is read and compressed as it would be alone.

    Attributes:
        request: reads the prompt; None once others can decode with it, or if the prompt is left to mlx-lm.
        caches: what the next token is decoded from.
        error: the exception that ended the request.
    """

    def __init__(self, settings: BatchSettings, uid: int, plan: Plan, prompt_cache: list):
        self.uid, self.model, self.plan, self._settings = uid, settings.model, plan, settings
        self.error: Exception | None = None
        self.request: Request | None = None
        self.caches = copy.deepcopy(prompt_cache)
        try:
            if plan.reason is None:
                self.request = make_request(self.model, plan, self.caches)
                self.caches = self.request.caches
            else:
                self.caches = plain_forms(self.model, self.caches)
                self._report(CompressionReport.of_full_cache(plan))
        except Exception as error:
            self.error = error

    @property
    def joins(self) -> bool:
        """Return whether others can decode with it: its prompt is compressed, or left to mlx-lm."""
        return self.error is None and self.request is None

    @property
    def loop_model(self) -> Any:
        """Return the model for mlx-lm's loop."""
        if self.request is not None:
            return self.request.model
        return one_by_one(self.model, self.caches)

    def recording(self) -> contextlib.AbstractContextManager[None]:
        """Patch the model's attention classes for the block, if queries are captured."""
        if self.request is not None:
            return self.request.recording()
        return observing(self.model, self.caches)

    def _report(self, report: CompressionReport) -> None:
        if self._settings.on_report is not None:
            self._settings.on_report(self.uid, report)

    def compress(self, tokens: list[int]) -> None:
        """Compress the caches, unless they are already compressed; `tokens` have been read."""
        if (request := self.request) is None:
            return
        on_read = self._settings.on_read
        # Nothing else holds the full entries, so that each layer's are freed before the next layer's turn.
        read_caches = None if on_read is None else self._all_entries(request)
        report = request.compress()
        self.request, self.caches = None, request.caches
        if on_read is not None and read_caches is not None:
            n, *more = {layer.entries_in(read_caches).offset for layer in request.layers}
            if not more:  # otherwise a call of the model was broken off
                on_read(self.uid, read_caches, list(tokens[:n]))
        self._report(report)

    def _all_entries(self, request: Request) -> list | None:
        """Return caches with all entries of what has been read, before a policy chooses; None if some are gone."""
        if request.plan.sparse is not None:
            return request.prompt_cache
        if request.plan.options.evicts_in_blocks:
            return None
        return saved_forms(self.model, copies_but_entries(request.caches, request.layers))

    def extracted(self) -> list:
        """Return copies of the caches of what has been read, for other requests to continue with."""
        read_caches = self.caches if self.request is None else self.request.read_caches
        caches = saved_forms(self.model, copy.deepcopy(read_caches))
        for cache in members(caches):
            if isinstance(cache, KVCache) and cache.offset:
                # Drop the room for the rest of the prompt.
                cache.keys, cache.values = map(mx.contiguous, cache.keys_and_values())
        mx.eval([cache.state for cache in caches])
        return caches
