"""A compressed or sparse request, from the first prompt chunk to the last answer token."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, final

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ..caches.layers import attention_layers
from ..models import attention_classes, patch
from ..planning.request_plan import Plan
from ..planning.speed_record import Measurement, record_measurements, speed_of
from ..sparse.prompt_caches import copy_to_store
from .compress import KeptCallback, measuring_compression
from .compress_mode import PolicyMode
from .loop_model import RequestModel
from .pieces import Pieces
from .read import prefill_caches, require_unchanged
from .report import CompressionReport
from .sparse_mode import SparseMode


class Mode(Protocol):
    """How a request reads and compresses its prompt.

    Implemented for policies (`compress_mode.py`) and for sparse attention (`sparse_mode.py`).
    """

    def read(self, inputs: mx.array, cache: list) -> mx.array:
        """Call the model on prompt tokens `(1, L)`, and return the last logits `(1, n, vocab_size)`."""

    def compress(self, caches: list, report: CompressionReport) -> None:
        """Replace the prefill caches with the caches for decoding, in place."""


@final
class Request:
    """A request that is compressed or uses sparse attention.

    mlx-lm's `generate_step` runs on the request's `model` and `caches`. It looks up the elements of `caches` at every
    step, so `compress` can replace them between steps.

    Args:
        model: the mlx-lm model.
        plan: the request's plan.
        prompt_cache: the caller's prompt cache. It is empty or contains earlier turns, compressed or not.
        on_kept: called for each layer with the kept entries.

    Attributes:
        model: the model to pass to mlx-lm's loop.
        caches: the caches to pass to mlx-lm's loop. `compress` replaces the prefill caches in this list with the
            caches for decoding.
        is_compressed: whether `compress` has replaced the caches.
        report: the report. `compress` fills it in.
    """

    def __init__(
        self, model: Any, plan: Plan, prompt_cache: list, on_kept: KeptCallback | None = None
    ):
        """Create the prefill caches."""
        self.model = RequestModel(model, self)
        self.plan = plan
        self.prompt_cache = prompt_cache
        self.report = CompressionReport(str(plan.config.setting), plan.n_prompt)
        self.layers = attention_layers(model, prompt_cache)
        self._model = model
        self._attention_classes = attention_classes(model)
        pieces = Pieces(model, self.layers, plan.n_new, plan.n_prompt)
        self._sparse_mode: SparseMode | None = None
        if plan.sparse is not None:
            self._sparse_mode = SparseMode(model, plan, self.layers, prompt_cache, pieces)
        self._mode: Mode = self._sparse_mode or PolicyMode(
            model, plan, self.layers, prompt_cache, pieces, on_kept
        )
        pace = None if self._sparse_mode is None else self._sparse_mode.pace
        self.caches = prefill_caches(plan, self.layers, prompt_cache, pace)
        self.is_compressed = False
        self._started: float | None = None
        self._prefill_seconds: float | None = None

    @property
    def caches_so_far(self) -> list:
        """Return the caches with the tokens read so far. Another request can continue from them."""
        return self.prompt_cache if self.plan.sparse is not None else self.caches

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Patch the model's attention classes within the `with` block if queries have to be captured."""
        if self._started is None:
            require_unchanged(self.plan, self.layers, self.prompt_cache)
            self._started = time.perf_counter()
        needs_queries = self.plan.observes_answer if self.is_compressed else self.plan.observes
        with patch.recording(self._attention_classes if needs_queries else []):
            yield

    def call(self, inputs: mx.array, cache: list) -> mx.array:
        """Call the model on prompt or answer tokens `(1, L)` for mlx-lm's loop, and return the logits."""
        if not self.is_compressed:
            return self._mode.read(inputs, cache)
        return self._model(inputs, cache=cache)

    def record_prefill_time(self) -> None:
        """Record the prefill time. Only the first call has an effect."""
        if self._prefill_seconds is None and self._started is not None:
            self._prefill_seconds = time.perf_counter() - self._started

    def compress(self) -> CompressionReport:
        """Compress `caches` after prefill, or again after `use_full_attention`, and return the report.

        Raises: SnapKVError: scores are NaN, or the store has no space for the entries.
        """
        self.record_prefill_time()
        self.report.prefill_seconds = self._prefill_seconds or 0.0
        with measuring_compression(
            self.plan, self.layers, self.prompt_cache, self.caches, self.report
        ):
            self._mode.compress(self.caches, self.report)
        self.is_compressed = True
        return self.report

    def use_full_attention(self) -> None:
        """Make the tokens of a sparse answer read all entries until `compress` is called again."""
        assert self._sparse_mode is not None
        self._sparse_mode.use_full_attention(self.caches)

    def tokens_to_repay_setup(self) -> float:
        """Estimate how many answer tokens it takes to make up for building the index, from the speed record.

        Return 0 for later turns of a conversation, which only extend the index.
        """
        assert self.plan.sparse is not None
        if self.plan.n_earlier:
            return 0
        return speed_of(self._model, self.plan.sparse).tokens_to_repay_setup(self.plan.n_prompt)

    def record_speed(self, answer_measurements: Sequence[Measurement] = ()) -> None:
        """Add the measured chunk and answer times to this machine's speed record."""
        assert self._sparse_mode is not None and self.plan.sparse is not None
        pace = self._sparse_mode.pace
        chunk_measurements = [] if pace is None else pace.measurements
        record_measurements(
            self._model, self.plan.sparse, [*chunk_measurements, *answer_measurements]
        )

    def finish(self) -> CompressionReport:
        """Finish a request whose answer never used sparse attention.

        Move its entries to the store, and return the report.
        """
        assert self._sparse_mode is not None
        self._sparse_mode.finish(self.caches, self.report)
        return self.report


def make_request(
    model: Any,
    plan: Plan,
    prompt_cache: list | None = None,
    *,
    uses_store: bool = False,
    on_kept: KeptCallback | None = None,
) -> Request:
    """Create the request for a plan.

    Args:
        model: an mlx-lm model.
        plan: the plan. Its `reason` must be None, because prompts with a reason are left to mlx-lm.
        prompt_cache: the prompt cache that the plan was made for. By default, a new one is created.
        uses_store: whether the prompt cache already uses the plan's store. If not, its entries are copied to the store.
        on_kept: called for each layer with the kept entries.

    Raises: SnapKVError: the store can't keep the prompt cache's entries.
    """
    caches = make_prompt_cache(model) if prompt_cache is None else prompt_cache
    if plan.sparse is not None and not uses_store:
        caches = copy_to_store(model, caches, plan.sparse)
    return Request(model, plan, caches, on_kept)
