"""One request from its first chunk to its cut.

mlx-lm's own `generate_step` drives: it is handed a list of recording caches, and reads that list at every
step, so the cut is a replacement of the list's entries between two of its steps.
"""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Iterator

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ..caches.answer import made
from ..caches.block import BlockKVCache
from ..caches.layers import AttentionLayer, attention_classes, attention_layers, members
from ..caches.quantized import require_quantizable
from ..caches.recording import RecordingKVCache
from ..entries.quantization import Quantization
from ..errors import SnapKVError
from ..models import patch as capture
from ..policies import Policy, Stages
from ..policies.budgets import Quota
from .compress import compress_prompt_cache, fits_reason, full_bytes, kv_bytes
from .report import CompressionReport

PREFILL_STEP_SIZE = 2048  # mlx-lm's own default

# A chunk's attention also computes what the causal mask hides, and holds its logits: on a CPU a prompt is read
# faster, and in a third of the memory, in smaller chunks (docs/benchmarks.md). Not measured on a GPU.
LARGEST_CHUNK = {mx.cpu: 512, mx.gpu: PREFILL_STEP_SIZE}


class RecordedRequest:
    """One request from its first chunk to its cut.

    Args:
        model: an mlx-lm model.
        policy: what to keep.
        n_prompt: tokens of the prompt.
        prompt_cache: the caller's empty cache list. It is not touched before the cut, and then holds the
            compressed caches: if anything raises on the way, it is as it was.
        last: position behind the last query that votes; the window starts `obs_window` prompt tokens
            before the prompt's own last voter.
        quantization: how the rows kept are to be quantised, if at all.

    Attributes:
        caches: the list to hand to mlx-lm.
        cut_seconds: what the cut itself took.

    Raises:
        SnapKVError: the model is not supported, its rows can't be quantised so, or the budget has no room for
            what is always kept.
    """

    def __init__(
        self,
        model,
        policy: Policy | Stages,
        n_prompt: int,
        prompt_cache: list,
        last: int,
        quantization: Quantization | None = None,
    ):
        self.model = model
        self.policy = policy
        self.reading, self.answering = policy.stages
        self.n_prompt = n_prompt
        self._callers = prompt_cache
        self._layers = attention_layers(model, prompt_cache)
        self._observed = attention_classes(self._layers) if self._observes() else []
        self._first = max(0, min(last, n_prompt) - self.answering.obs_window)
        self._last = last
        self._quantization = quantization
        if quantization is not None:
            fresh = make_prompt_cache(model)
            require_quantizable(model, self._layers, fresh, quantization)
        quotas = policy.prefill_quotas(n_prompt, len(self._layers))
        self._uniform = len(set(quotas)) == 1
        self.caches = self._reading_caches(quotas)
        self.cut_seconds = 0.0
        self._started = 0.0
        self._prefill_seconds: float | None = None

    @property
    def _in_blocks(self) -> bool:
        """Whether block caches read the prompt: they evict, or they count what all queries attend to."""
        return self.reading.schedule == "block" or self.reading.accumulates_attention

    def _observes(self) -> bool:
        return self.reading.observes or self.answering.observes

    def _reading_caches(self, quotas: list[Quota]) -> list:
        """Empty caches to read the prompt with."""
        caches = [copy.deepcopy(c) for c in self._callers]
        capacity = max(self.n_prompt, self._last) + 1
        for layer, quota in zip(self._layers, quotas):
            if self._in_blocks:
                layer.put(caches, self._block_cache(layer, quota, self._quantization))
            else:
                layer.put(caches, RecordingKVCache(self._first, self._last, capacity))
        return caches

    def _block_cache(
        self, layer: AttentionLayer, quota: Quota, quantization: Quantization | None
    ) -> BlockKVCache:
        cache = made(
            BlockKVCache,
            quantization,
            self.reading,
            quota,
            self.reading.block,
            family=layer.family,
            last=self._last,
            newest=max(self.reading.obs_window, self.answering.obs_window),
            expected=max(self.n_prompt, self._last) + 1,
            uniform=self._uniform,
        )
        cache.tallies = self.reading.accumulates_attention or self.answering.accumulates_attention
        return cache

    def step_size(self, limit: int | None) -> int:
        """The chunk size to read the prompt with, at most `limit`.

        Under "once" it is the one nearest below that leaves the observation window to a short last chunk. The
        queries of a whole chunk then never wait, in the middle of its attention, for a few of them to be
        copied: at most the memory of mlx-lm's own prefill is needed. A prompt of one chunk stays one.
        """
        largest = LARGEST_CHUNK[mx.default_device().type]
        limit = self.reading.prefill_chunk or min(limit or largest, largest)
        if self._in_blocks:
            return min(limit, self.reading.block)
        if self.n_prompt - 1 <= limit or self._first == 0 or not self._observes():
            return limit
        chunks = -(-self._first // limit)
        return self._first // chunks

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Patch the model's attention classes for the block, from the first chunk to the last voter."""
        self._require_fresh()
        self._started = time.perf_counter()
        with capture.recording(self._observed):
            yield

    @contextlib.contextmanager
    def decoding(self) -> Iterator[None]:
        """The same for the tokens after the cut, whose queries vote only if rows are still to be evicted."""
        with capture.recording(self._observed if self.answering.observes_answer else []):
            yield

    def prompt_is_read(self) -> None:
        """Stop the prefill's clock; the first call counts."""
        if self._prefill_seconds is None:
            self._prefill_seconds = time.perf_counter() - self._started

    def cut(self) -> CompressionReport:
        """Compress the caches and hand them to the caller's list."""
        self.prompt_is_read()
        started = time.perf_counter()
        self._require_fresh()
        reading = self._block_caches()
        seconds = sum(cache.selection_seconds for cache in reading)
        if self.answering is self.reading and self.reading.schedule == "block":
            report = self._evict()
        else:
            report = compress_prompt_cache(
                self.model, self.caches, self.answering, quantization=self._quantization
            )
            if report.reason is not None and reading:
                report = self._evict()
        report.policy = str(self.policy)
        report.prompt_tokens = self.n_prompt
        report.selection_seconds += seconds
        report.prefill_seconds = (self._prefill_seconds or 0.0) - seconds
        self._callers[:] = self.caches
        self.cut_seconds = time.perf_counter() - started
        return report

    def _block_caches(self) -> list[BlockKVCache]:
        caches = (layer.cache_in(self.caches) for layer in self._layers)
        return [cache for cache in caches if isinstance(cache, BlockKVCache)]

    def _evict(self) -> CompressionReport:
        """Bring the block caches, which go on, down to their quotas."""
        started = time.perf_counter()
        report = CompressionReport(str(self.policy), self.n_prompt)
        report.rows_kept = [None] * len(self.caches)
        report.mass_kept = [None] * len(self.caches)
        for layer in self._layers:
            cache = layer.cache_in(self.caches)
            cache.evict()
            cache.last = math.inf
            report.rows_kept[layer.index] = cache.size()
            report.kv_bytes_before += full_bytes(cache)
        if all(cache.size() == cache.offset for cache in self._block_caches()):
            report.reason = (
                fits_reason(self.n_prompt, self.policy) + "; the answer is kept within it"
            )
        report.kv_bytes_after = kv_bytes(self.caches)
        report.selection_seconds = time.perf_counter() - started
        return report

    def _require_fresh(self) -> None:
        if not is_fresh(self._callers):
            raise SnapKVError(
                "another request has filled this prompt cache meanwhile: give each its own"
            )


def is_fresh(prompt_cache: list) -> bool:
    # Every layer is asked: in a hybrid the first one is not a KV cache and has no offset.
    return all(c.empty() for c in members(prompt_cache))


def last_voter(policy: Policy | Stages, n_prompt: int, lookahead: int) -> int:
    """The position behind the last query that votes."""
    _, answering = policy.stages
    return n_prompt + lookahead if answering.last_token else n_prompt - 1
