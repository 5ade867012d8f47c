"""A compressed or sparse request, from the first prompt chunk to the last answer token."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any, final

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ..caches.layers import attention_layers
from ..errors import SnapKVError
from ..models import attention_classes, patch
from ..planning.prompt_plan import uncompressed_reason
from ..planning.request_plan import Plan
from ..planning.speed_record import Measurement, record_measurements, speed_of
from ..sparse.prompt_caches import copy_to_store
from .compress import (
    KeptCallback,
    choose_entries,
    measuring_compression,
    note_choices,
    put_compressed_cache,
)
from .loop_model import RequestModel
from .pieces import Pieces
from .read import prefill_caches
from .report import CompressionReport
from .sparse_mode import SparseMode


@final
class Request:
    """A request that is compressed or uses sparse attention.

    mlx-lm's `generate_step` runs on the request's `model` and `caches`. It looks up the elements of `caches` at every
    step, so `compress` can replace them between steps.

    Args:
        model: the mlx-lm model.
        plan: the request's plan. `plan.is_left_to_mlx_lm` must be False.
        prompt_cache: the prompt cache that the plan was made for. It is empty or contains earlier turns, compressed or
            not. By default, a new one is created.
        uses_store: with sparse attention, whether the prompt cache already uses the plan's store. If not, its entries
            are copied to the store.
        on_kept: called for each layer with the kept entries.

    Attributes:
        model: the model to pass to mlx-lm's loop.
        caches: the caches to pass to mlx-lm's loop. `compress` replaces the prefill caches in this list with the caches
            for decoding.
        prompt_cache: the caller's prompt cache or, if its entries were copied to a store, the caches of the store.
        is_compressed: whether `compress` has replaced the caches.
        report: the report, filled in by `compress` or `finish`.

    Raises: SnapKVError: the store can't keep the prompt cache's entries.
    """

    def __init__(
        self,
        model: Any,
        plan: Plan,
        prompt_cache: list | None = None,
        *,
        uses_store: bool = False,
        on_kept: KeptCallback | None = None,
    ):
        """Create the prefill caches."""
        if prompt_cache is None:
            prompt_cache = make_prompt_cache(model)
        if plan.sparse is not None and not uses_store:
            prompt_cache = copy_to_store(model, prompt_cache, plan.sparse)
        self.model = RequestModel(model, self)
        self.plan = plan
        self.prompt_cache = prompt_cache
        self.report = CompressionReport(str(plan.config.setting), plan.n_prompt)
        self.layers = attention_layers(model, prompt_cache)
        self._model = model
        self._on_kept = on_kept
        self._attention_classes = attention_classes(model)
        self._call_in_pieces = Pieces(model, self.layers, plan)
        self._sparse_mode: SparseMode | None = None
        if plan.sparse is None:
            self.caches = prefill_caches(plan, self.layers, prompt_cache)
        else:
            self._sparse_mode = SparseMode(plan, self.layers, prompt_cache, self._call_in_pieces)
            self.caches = self._sparse_mode.prefill_caches()
        self.is_compressed = False
        self._started: float | None = None
        self._prefill_seconds: float | None = None

    @property
    def caches_so_far(self) -> list:
        """Return the caches with the tokens read so far. Another request can continue from them."""
        return self.prompt_cache if self.plan.sparse is not None else self.caches

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Patch the model's attention classes within the `with` block if queries have to be captured.

        The first call also starts measuring the prefill time.

        Raises: SnapKVError: the prompt cache has changed since planning.
        """
        if self._started is None:
            self._require_unchanged()
            self._started = time.perf_counter()
        needs_queries = self.plan.observes_answer if self.is_compressed else self.plan.observes
        with patch.recording(self._attention_classes if needs_queries else []):
            yield

    def call(self, inputs: mx.array, cache: list) -> mx.array:
        """Call the model on prompt or answer tokens `(1, L)` for mlx-lm's loop, and return the logits."""
        if self.is_compressed:
            return self._model(inputs, cache=cache)
        if self._sparse_mode is not None:
            return self._sparse_mode.read(inputs, cache)
        return self._call_in_pieces(inputs, cache)

    def record_prefill_time(self) -> None:
        """Record the prefill time. Only the first call has an effect."""
        if self._prefill_seconds is None and self._started is not None:
            self._prefill_seconds = time.perf_counter() - self._started

    def compress(self) -> CompressionReport:
        """Compress `caches` after prefill, or again after `use_full_attention`, and return the report.

        Raises: SnapKVError: scores are NaN, another request has filled the prompt cache, or the disk is full.
        """
        self.record_prefill_time()
        self.report.prefill_seconds = self._prefill_seconds or 0.0
        with measuring_compression(
            self.plan, self.layers, self.prompt_cache, self.caches, self.report
        ):
            if self._sparse_mode is not None:
                self._sparse_mode.compress(self.caches, self.report)
            else:
                self._evict()
        self.is_compressed = True
        return self.report

    def _evict(self) -> None:
        """Replace `caches` with caches that hold only the entries to keep, then update the caller's prompt cache.

        The work on all layers is queued without waiting for the device. Python blocks only once, in `note_choices`.
        """
        self._require_unchanged()
        choices = []
        for layer in self.layers:
            choice = choose_entries(layer, self.caches, self.plan)
            put_compressed_cache(layer, self.caches, self.plan, choice, self._on_kept)
            choices.append(choice)
        note_choices(choices, self.layers, self.caches, self.report)
        self.prompt_cache[:] = self.caches
        self.report.reason = _why_none_evicted(self.plan, self.report)

    def _require_unchanged(self) -> None:
        """Check that the prompt cache has not changed since planning. Raises: SnapKVError."""
        caches = [layer.layer_cache_in(self.prompt_cache) for layer in self.layers]
        if any(cache.offset != self.plan.n_earlier for cache in caches):
            raise SnapKVError(
                "another request has filled this prompt cache: give each request its own"
            )

    def use_full_attention(self) -> None:
        """Make the tokens of a sparse answer read all entries until `compress` is called again."""
        assert self._sparse_mode is not None
        self._sparse_mode.use_full_attention(self.caches)

    def tokens_to_repay_setup(self) -> float:
        """Estimate from the speed record how many answer tokens it takes to make up for building the index.

        Return 0 if that is unknown, and infinity if sparse attention is not faster. Also return 0 in later turns of a
        conversation, because they only extend the index.
        """
        assert self.plan.sparse is not None
        if self.plan.n_earlier:
            return 0
        return speed_of(self._model, self.plan.sparse).tokens_to_repay_setup(self.plan.n_prompt)

    def record_speed(self, measurements: list[Measurement]) -> None:
        """Add an answer's measurements to this machine's speed record."""
        assert self.plan.sparse is not None
        record_measurements(self._model, self.plan.sparse, measurements)

    def finish(self) -> CompressionReport:
        """Finish a request whose answer never used sparse attention.

        Move its entries to the store, and return the report.
        """
        assert self._sparse_mode is not None
        self._sparse_mode.finish(self.caches, self.report)
        return self.report


def _why_none_evicted(plan: Plan, report: CompressionReport) -> str | None:
    """If schedule="block" and no prompt entries were evicted, explain why. Otherwise, return None."""
    if plan.decode_policy.schedule != "block" or report.entries < plan.n_prompt:
        return None
    reason = uncompressed_reason(plan.n_prompt, plan.prefill_policy)
    return f"{reason}; the answer is kept within it"
