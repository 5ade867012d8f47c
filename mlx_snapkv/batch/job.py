"""One request of a batch, up to the compression of its prompt."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from ..caches.layers import copies_but_entries, members
from ..engine.report import NO_POLICY, CompressionReport
from ..engine.request import Request, Uncompressed, make_request
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
    """What becomes of one prompt's cache, whatever else is in the batch: what becomes of it alone."""

    def __init__(self, settings: BatchSettings, uid: int, plan: Plan, prompt_cache: list):
        self.uid, self.model, self._settings = uid, settings.model, settings
        self.error: Exception | None = None  # what ended the request
        given = copy.deepcopy(prompt_cache)
        # How it is read and answered; `Uncompressed` once others can decode with it.
        self.request: Request | Uncompressed = Uncompressed(
            self.model, given, CompressionReport(NO_POLICY, plan.n_new)
        )
        try:
            self.request = make_request(self.model, plan, given)
            if self.joins:
                self.request.caches = plain_forms(self.model, given)
                self._report()
        except Exception as error:
            self.error = error

    @property
    def joins(self) -> bool:
        """Whether others can decode with it: it is compressed, or left to mlx-lm."""
        return self.error is None and isinstance(self.request, Uncompressed)

    def _report(self) -> None:
        if self._settings.on_report is not None:
            self._settings.on_report(self.uid, self.request.report)

    def compress(self, tokens: list[int]) -> None:
        """Compress the caches, unless they are already; `tokens` have been read."""
        request = self.request
        if isinstance(request, Uncompressed):
            return
        caches = self._all_entries(request)
        request.compress()
        self.request = Uncompressed(self.model, request.caches, request.report)
        if caches is not None and self._settings.on_read is not None:
            n, *more = {x.entries_in(caches).offset for x in request.layers}
            if not more:  # or a call of the model was broken off
                self._settings.on_read(self.uid, caches, list(tokens[:n]))
        self._report()

    def _all_entries(self, request: Request) -> list | None:
        """Return caches with all entries of what has been read, before a policy chooses; None if some are gone."""
        options = request.plan.options
        if options.sparse is not None:
            return request.prompt_cache
        if options.evicts_in_blocks:
            return None
        return saved_forms(self.model, copies_but_entries(request.caches, request.layers))

    def extracted(self) -> list:
        """The caches as they are, for others to go on with."""
        caches = saved_forms(self.model, copy.deepcopy(self.request.read_caches))
        for cache in members(caches):
            if isinstance(cache, KVCache) and cache.offset:
                # Without the room that there is for the rest of the prompt.
                cache.keys, cache.values = map(mx.contiguous, cache.keys_and_values())
        mx.eval([cache.state for cache in caches])
        return caches
