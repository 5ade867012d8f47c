"""One request of a batch, up to the compression of its prompt."""

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from ..caches.layers import copies_sharing_entries, members
from ..engine.loop_model import observing, one_by_one
from ..engine.report import CompressionReport
from ..engine.request import Request, make_request
from ..planning.request_plan import Plan
from ..sparse.prompt_caches import plain_forms, saved_forms

BatchReport = Callable[[int, CompressionReport], None]


@dataclass(frozen=True)
class BatchSettings:
    """The settings that all requests of a batch share; see `CompressedBatchGenerator`."""

    model: Any
    on_report: BatchReport | None
    on_read: Callable[[int, list, list[int]], None] | None


class Job:
    """One request of a batch, whose prompt is read and compressed as if the request were alone.

    Args:
        settings: what all requests of the batch share.
        uid: the request's number in the batch.
        plan: the request's plan; with a `reason`, the prompt is left to mlx-lm.
        prompt_cache: the request's prompt cache, which is copied.

    Attributes:
        request: reads and compresses the prompt; None after that, or if the prompt is left to mlx-lm.
        caches: the caches for the next token.
        error: the exception that ended the request.
    """

    def __init__(self, settings: BatchSettings, uid: int, plan: Plan, prompt_cache: list):
        """Make the caches to read the prompt on; a failure is kept as `error` for the first response."""
        self.uid = uid
        self.model = settings.model
        self.plan = plan
        self._settings = settings
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
        except Exception as error:  # ends only this request, with its first response
            self.error = error

    @property
    def can_join(self) -> bool:
        """Return whether the request can decode with others: its prompt is compressed, or left to mlx-lm."""
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
        """Give the report to `on_report`, if there is one."""
        if self._settings.on_report is not None:
            self._settings.on_report(self.uid, report)

    def compress(self, tokens: list[int]) -> None:
        """Compress the caches at the first call, and call `on_read` and `on_report`.

        Args:
            tokens: the tokens that the request has read.
        """
        request = self.request
        if request is None:
            return
        on_read = self._settings.on_read
        # Without `on_read` nothing else refers to the full entries, so each layer's are freed when it is compressed.
        read_caches = None if on_read is None else self._all_entries(request)
        report = request.compress()
        self.request = None
        self.caches = request.caches
        if on_read is not None and read_caches is not None:
            lengths = {layer.entries_in(read_caches).offset for layer in request.layers}
            if len(lengths) == 1:  # layers differ if a call of the model was interrupted
                (n_tokens,) = lengths
                on_read(self.uid, read_caches, list(tokens[:n_tokens]))
        self._report(report)

    def _all_entries(self, request: Request) -> list | None:
        """Return caches with the entries of all tokens read; None if entries were evicted during prefill."""
        if request.plan.sparse is not None:
            return request.prompt_cache
        if request.plan.options.evicts_in_blocks:
            return None
        return saved_forms(self.model, copies_sharing_entries(request.caches, request.layers))

    def copy_caches(self) -> list:
        """Return copies of the caches of the tokens read so far, from which other requests can continue."""
        read_caches = self.caches if self.request is None else self.request.read_caches
        caches = saved_forms(self.model, copy.deepcopy(read_caches))
        for cache in members(caches):
            if isinstance(cache, KVCache) and cache.offset:
                # Drop the buffers' room for the rest of the prompt.
                cache.keys, cache.values = map(mx.contiguous, cache.keys_and_values())
        mx.eval([cache.state for cache in caches])
        return caches
