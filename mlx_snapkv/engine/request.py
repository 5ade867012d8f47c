"""One request, from its first chunk to the last token of its answer."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any, Protocol, final

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ..caches.layers import attention_layers
from ..models import attention_classes
from ..models.patch import recording
from ..planning.request_plan import Plan
from ..sparse.prompt_caches import moved_to_store
from .compress import KeptCallback, measured
from .compress_mode import PolicyMode
from .loop_model import RequestModel
from .pieces import Pieces
from .read import reading_caches, require_unchanged
from .report import CompressionReport
from .sparse_mode import SparseMode


class Mode(Protocol):
    """What a policy (`policy.py`) and sparse attention (`sparse.py`) each do in their own way."""

    def read(self, inputs: mx.array, cache: list) -> mx.array:
        """Call the model for tokens `(1, L)` of the prompt, on the caches that it is read on; return the logits
        `(1, n, vocab_size)` of the last `n`."""

    def compress(self, caches: list, report: CompressionReport) -> None:
        """Replace `caches`, on which the prompt was read, by those that the answer is decoded from, and note it."""


@final
class Request:
    """One request that is compressed: it reads a prompt on `caches`, replaces them by what stays of it, and says how
    the answer is decoded from that.

    mlx-lm's own `generate_step` drives, on `model` and `caches`, and reads that list at every step: the compression
    replaces its entries between two of its steps.

    Args:
        plan: what is decided about it.
        prompt_cache: holds earlier turns, in full or compressed, or nothing.
        on_kept: receives what a policy keeps of each layer.

    Attributes:
        caches: what mlx-lm is to be handed; once compressed, what the answer is decoded from.
        is_compressed: the prompt has been read, and `caches` are the answer's.
        report: what the compression did; empty before.
    """

    def __init__(
        self, model: Any, plan: Plan, prompt_cache: list, on_kept: KeptCallback | None = None
    ):
        self.model, self.plan, self.prompt_cache = RequestModel(model, self), plan, prompt_cache
        self.report = CompressionReport(str(plan.options.setting), plan.n_prompt)
        self.layers = attention_layers(model, prompt_cache)
        self._model, self._observed = model, attention_classes(model)
        pieces = Pieces(model, self.layers, plan.n_new, plan.n_prompt)
        self._mode: Mode
        if plan.sparse is not None:
            self._mode = SparseMode(plan, self.layers, prompt_cache, pieces)
        else:
            self._mode = PolicyMode(model, plan, self.layers, prompt_cache, pieces, on_kept)
        self.caches = reading_caches(plan, self.layers, prompt_cache)
        self.is_compressed = False
        self._started: float | None = None
        self._prefill_seconds: float | None = None

    @property
    def read_caches(self) -> list:
        """The caches of what has been read so far, for other requests to go on from."""
        return self.prompt_cache if self.plan.sparse is not None else self.caches

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Patch the model's attention classes for the block, if queries are asked for."""
        if self._started is None:
            require_unchanged(self.plan, self.layers, self.prompt_cache)
            self._started = time.perf_counter()
        observes = self.plan.observes_answer if self.is_compressed else self.plan.observes
        with recording(self._observed if observes else []):
            yield

    def call(self, inputs: mx.array, cache: list) -> mx.array:
        """The model's call for tokens `(1, L)`, as mlx-lm's loop makes it: of the prompt, or of the answer."""
        if not self.is_compressed:
            return self._mode.read(inputs, cache)
        return self._model(inputs, cache=cache)

    def prompt_is_read(self) -> None:
        """Stop the prefill's clock, if it was started; the first call counts."""
        if self._prefill_seconds is None and self._started is not None:
            self._prefill_seconds = time.perf_counter() - self._started

    def compress(self) -> CompressionReport:
        """Compress `caches`, once, and let the answer begin; what was done.

        Raises: SnapKVError: the scores are NaN, or there is no room for the entries that stay.
        """
        if self.is_compressed:
            return self.report
        self.prompt_is_read()
        self.report.prefill_seconds = self._prefill_seconds or 0.0
        with measured(self.plan, self.layers, self.prompt_cache, self.caches, self.report):
            self._mode.compress(self.caches, self.report)
        self.is_compressed = True
        return self.report


def make_request(
    model: Any,
    plan: Plan,
    prompt_cache: list | None = None,
    *,
    owned: bool = False,
    on_kept: KeptCallback | None = None,
) -> Request:
    """Return the request that carries out a plan, which does not leave the prompt to mlx-lm.

    Args:
        prompt_cache: the one that the plan was made for; None is a new one.
        owned: the cache was made for the plan's store; the entries of any other are copied into one that is.
        on_kept: receives what a policy keeps of each layer.

    Raises: SnapKVError: entries of the prompt cache are gone, or can't be kept in that store.
    """
    caches = make_prompt_cache(model) if prompt_cache is None else prompt_cache
    if plan.options.store is not None and not owned:
        caches = moved_to_store(model, caches, plan.options.store, plan.options.store_dir)
    return Request(model, plan, caches, on_kept)
