"""A batched request, from the start of prefill until its prompt has been compressed."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from ..caches.layers import all_caches, attention_layers, copies_sharing_entries
from ..engine.loop_model import observing_queries, split_at_evictions
from ..engine.report import CompressionReport
from ..engine.request import Request
from ..planning.request_plan import Plan
from ..sparse.prompt_caches import caches_to_batch, caches_to_save

BatchReport = Callable[[int, CompressionReport], None]
OnRead = Callable[[int, list, list[int]], None]


class Job:
    """A batched request. Its prompt is read and compressed independently of other prompts.

    Args:
        model: the model.
        uid: the request's uid.
        plan: the request's plan. If it has a `reason`, the prompt is left to mlx-lm: it is neither compressed nor read
            with sparse attention.
        prompt_cache: the prompt cache to continue from. It is copied.
        on_report: see `CompressedBatchGenerator`.
        on_read: see `CompressedBatchGenerator`.

    Attributes:
        request: the `Request` that reads and compresses the prompt. None after compression, or if the prompt is left to
            mlx-lm.
        caches: the caches for the next token.
        error: the exception that ended the request, or None.
    """

    def __init__(
        self,
        model: Any,
        uid: int,
        plan: Plan,
        prompt_cache: list,
        on_report: BatchReport,
        on_read: OnRead | None,
    ):
        """Create the prefill caches. Exceptions are stored in `error` and reported in the first response."""
        self.model = model
        self.uid = uid
        self.plan = plan
        self._on_report = on_report
        self._on_read = on_read
        self.error: Exception | None = None
        self.request: Request | None = None
        self.caches = copy.deepcopy(prompt_cache)
        try:
            if plan.is_left_to_mlx_lm:
                attention_layers(model, self.caches)  # raises an error for another model's caches
                self.caches = caches_to_batch(self.caches)
                on_report(uid, CompressionReport.of_full_cache(plan))
            else:
                self.request = Request(self.model, plan, self.caches)
                self.caches = self.request.caches
        except Exception as error:  # must not affect other requests
            self.error = error

    @property
    def can_join(self) -> bool:
        """Return whether the request can decode with others.

        It can if its prompt has been compressed or is left to mlx-lm, unless the request has failed.
        """
        return self.error is None and self.request is None

    @property
    def loop_model(self) -> Any:
        """Return the model to pass to mlx-lm's loop."""
        if self.request is not None:
            return self.request.model
        return split_at_evictions(self.model, self.caches)

    def recording(self) -> contextlib.AbstractContextManager[None]:
        """Patch the attention classes within the `with` block if queries have to be recorded."""
        if self.request is not None:
            return self.request.recording()
        return observing_queries(self.model, self.caches)

    def compress(self, tokens: list[int]) -> None:
        """Compress the caches, and call `on_read` and `on_report`. Only the first call has an effect.

        Args:
            tokens: the tokens that the request has read.
        """
        request = self.request
        if request is None:
            return
        on_read = self._on_read
        # Keep a reference to the full caches only if `on_read` needs them, so that otherwise each layer's full cache is
        # freed when the layer is compressed.
        full_caches = None if on_read is None else self._full_caches(request)
        report = request.compress()
        self.request = None
        self.caches = request.caches
        if on_read is not None and full_caches is not None:
            # Call `on_read` only if all layers have the same length. After an interrupted model call, the lengths can
            # differ, and no other request can continue from such caches.
            lengths = {layer.layer_cache_in(full_caches).offset for layer in request.layers}
            if len(lengths) == 1:
                (n_tokens,) = lengths
                on_read(self.uid, full_caches, list(tokens[:n_tokens]))
        self._on_report(self.uid, report)

    def _full_caches(self, request: Request) -> list | None:
        """Return caches with all entries so far, or None if the policy evicts during prefill."""
        if request.plan.sparse is not None:
            return request.prompt_cache
        if request.plan.config.evicts_in_blocks:
            return None
        return caches_to_save(copies_sharing_entries(request.caches, request.layers))

    def copy_caches(self) -> list:
        """Copy the caches, which contain the tokens read so far. Other requests can continue from the copies."""
        caches_so_far = self.caches if self.request is None else self.request.caches_so_far
        caches = caches_to_save(copy.deepcopy(caches_so_far))
        for cache in all_caches(caches):
            if isinstance(cache, KVCache) and cache.offset > 0:
                # Free the rows that are allocated for the rest of the prompt.
                cache.keys, cache.values = map(mx.contiguous, cache.keys_and_values())
        mx.eval([cache.state for cache in caches])
        return caches
