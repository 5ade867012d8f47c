"""Reading a prompt through recording caches, and cutting them when the votes are in.

mlx-lm's own `generate_step` drives: it is handed a list of recording caches, and reads that list at every
step, so the cut is a replacement of the list's entries between two of its steps.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import math
import time
from collections.abc import Callable, Iterator, Sequence

import mlx.core as mx
from mlx_lm.models.cache import KVCache, make_prompt_cache

from . import capture, models
from .block_cache import BlockKVCache
from .budgets import Quota
from .compress import compress_prompt_cache, fits_reason, full_bytes, kv_bytes
from .errors import SnapKVError
from .models import AttentionLayer
from .policies import Policy, Stages, resolve_policy
from .recorder import Recorder, RecordingKVCache
from .report import CompressionReport

# mlx_lm re-exports a function under the module's own name.
mlx_generate = importlib.import_module("mlx_lm.generate")

ProgressCallback = Callable[[int, int], None]

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

    Attributes:
        caches: the list to hand to mlx-lm.
        cut_seconds: what the cut itself took.

    Raises:
        SnapKVError: the model is not supported, or the budget has no room for what is always kept.
    """

    def __init__(
        self, model, policy: Policy | Stages, n_prompt: int, prompt_cache: list, last: int
    ):
        self.model = model
        self.policy = policy
        self.reading, self.answering = policy.stages
        self.n_prompt = n_prompt
        self._callers = prompt_cache
        self._layers = models.attention_layers(model, prompt_cache)
        self._observed = models.attention_classes(self._layers) if self._observes() else []
        self._first = max(0, min(last, n_prompt) - self.answering.obs_window)
        self._last = last
        self.answering.quotas(n_prompt, len(self._layers))  # a budget without room shows now
        quotas = policy.reading_quotas(n_prompt, len(self._layers))
        self._uniform = len(set(quotas)) == 1
        self.caches = self._reading_caches(quotas)
        self.cut_seconds = 0.0
        self._started = 0.0
        self._prefill_seconds: float | None = None

    @property
    def _in_blocks(self) -> bool:
        """Whether block caches read the prompt: they evict, or they count what all queries attend to."""
        return self.reading.schedule == "block" or self.reading.tallies

    def _observes(self) -> bool:
        return self.reading.observes or self.answering.observes

    def _reading_caches(self, quotas: list[Quota]) -> list:
        """Empty caches to read the prompt with."""
        caches = [copy.deepcopy(c) for c in self._callers]
        capacity = max(self.n_prompt, self._last) + 1
        for layer, quota in zip(self._layers, quotas):
            if self._in_blocks:
                layer.put(caches, self._block_cache(layer, quota))
            else:
                layer.put(caches, RecordingKVCache(self._first, self._last, capacity))
        return caches

    def _block_cache(self, layer: AttentionLayer, quota: Quota) -> BlockKVCache:
        cache = BlockKVCache(
            self.reading,
            quota,
            self.reading.block,
            family=layer.family,
            last=self._last,
            newest=max(self.reading.obs_window, self.answering.obs_window),
            expected=max(self.n_prompt, self._last) + 1,
            uniform=self._uniform,
        )
        cache.tallies = self.reading.tallies or self.answering.tallies
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
        goes_on = self.answering.schedule == "block" and self.answering.observes
        with capture.recording(self._observed if goes_on else []):
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
            report = compress_prompt_cache(self.model, self.caches, self.answering)
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
        if not _is_fresh(self._callers):
            raise SnapKVError(
                "another request has filled this prompt cache meanwhile: give each its own"
            )


def _is_fresh(prompt_cache: list) -> bool:
    # Every layer is asked: in a hybrid the first one is not a KV cache and has no offset.
    return all(c.empty() for c in models.members(prompt_cache))


def last_voter(policy: Policy | Stages, n_prompt: int, lookahead: int) -> int:
    """The position behind the last query that votes."""
    _, answering = policy.stages
    return n_prompt + lookahead if answering.last_token else n_prompt - 1


def gate(
    policy: Policy | Stages, n_prompt: int, prompt_cache: list | None, max_tokens: int = 0
) -> str | None:
    """Why a request is left to mlx-lm as it is, or None if it is to be compressed.

    Args:
        max_tokens: tokens that will be generated, which a block policy keeps within the budget too; -1 is no end.

    Raises:
        SnapKVError: the prompt is empty.
    """
    if n_prompt == 0:
        raise SnapKVError("the prompt is empty: give at least one token")
    if prompt_cache is not None and not _is_fresh(prompt_cache):
        return "the prompt cache already holds tokens; only a fresh one is compressed"
    if n_prompt < policy.min_ctx:
        return (
            f"the prompt's {n_prompt} tokens are below min_ctx={policy.min_ctx}; "
            "set min_ctx=0 to force compression"
        )
    _, answering = policy.stages
    rows = n_prompt if answering.last_token else n_prompt - 1  # at the time of the cut, at least
    stays = answering.schedule == "once" or (max_tokens >= 0 and policy.fits(rows + max_tokens))
    return fits_reason(rows, policy) if policy.fits(rows) and stays else None


def prefill(
    model,
    tokens: mx.array | Sequence[int],
    policy: Policy | Stages | str,
    *,
    prompt_cache: list | None = None,
    prefill_step_size: int = PREFILL_STEP_SIZE,
    prompt_progress_callback: ProgressCallback | None = None,
) -> tuple[list, CompressionReport]:
    """Feed all of `tokens` to the model and compress its prompt cache.

    For people who decode with mlx-lm directly: feed `prompt[:-1]` here and give `prompt[-1:]` and the cache
    to mlx-lm's `generate_step`. The last `obs_window` of these tokens vote, and with `lookahead=n`
    the next `n` greedy tokens too, which are taken back before the cut.

    Args:
        tokens: `(T,)` token ids.
        policy: a policy object, or a string such as `"snapkv:top_k=1024"`.
        prompt_cache: an empty cache of the model to fill; by default a new one.
        prefill_step_size: tokens a chunk at most, unless the policy's `prefill_chunk` says otherwise.
        prompt_progress_callback: called with the tokens processed and their total.

    Returns:
        The prompt cache and the report, whose `reason` is set if the cache was not compressed.

    Raises:
        SnapKVError: `tokens` is empty, the policy can't be read, the model is not supported, or its attention gave NaN.
    """
    chosen = resolve_policy(policy=policy)
    if chosen is None:
        raise SnapKVError("prefill needs a policy, such as SnapKV(top_k=4096)")
    policy = chosen
    tokens = tokens if isinstance(tokens, mx.array) else mx.array(list(tokens))
    if tokens.ndim != 1:
        raise SnapKVError(f"the prompt must be one sequence of tokens, got shape {tokens.shape}")
    cache = make_prompt_cache(model) if prompt_cache is None else prompt_cache
    reading, answering = policy.stages
    options = {
        "prefill_step_size": reading.prefill_chunk or prefill_step_size,
        "prompt_progress_callback": prompt_progress_callback,
    }
    reason = gate(policy, tokens.size, cache)
    if reason is not None:
        read(model, tokens, cache, options)
        return cache, CompressionReport(str(policy), tokens.size, reason)
    lookahead = answering.lookahead or 0
    request = RecordedRequest(model, policy, tokens.size, cache, last=tokens.size + lookahead)
    options["prefill_step_size"] = request.step_size(prefill_step_size)
    with request.recording():
        following = read(model, tokens, request.caches, options)
        request.prompt_is_read()
        if lookahead:
            _look_ahead(model, request, following, lookahead)
        report = request.cut()
    return cache, report


def read(model, tokens: mx.array, prompt_cache: list, options: dict) -> mx.array:
    """Feed `tokens` in chunks by mlx-lm's loop; the greedy token that follows them, `(1,)`."""
    following = []

    def sampler(logprobs: mx.array) -> mx.array:
        following.append(mx.argmax(logprobs, axis=-1))
        return following[-1]

    for _ in mlx_generate.generate_step(
        tokens, model, max_tokens=0, sampler=sampler, prompt_cache=prompt_cache, **options
    ):
        raise AssertionError("mlx-lm yielded a token of a request for none")
    return following[-1]


def _look_ahead(model, request: RecordedRequest, following: mx.array, n: int) -> None:
    """Decode `n` tokens on the full rows so that their queries are recorded, then take them back."""
    caches = list(models.members(request.caches))
    others = [(c, copy.deepcopy(c)) for c in caches if not isinstance(c, (KVCache, Recorder))]
    for cache in caches:
        if isinstance(cache, BlockKVCache):
            cache.make_room(n)
    # The loop feeds the token it is given and each one it yields.
    for _ in mlx_generate.generate_step(
        following, model, max_tokens=n - 1, prompt_cache=request.caches
    ):
        pass
    for cache in caches:
        if isinstance(cache, (RecordingKVCache, BlockKVCache)):
            cache.trim(cache.offset - request.n_prompt)
    for cache, before in others:
        vars(cache).update(vars(before))


def block_size(prompt_cache: list) -> int | None:
    """Tokens that a prompt cache with a budget takes at a time; None for any other."""
    caches = (c for c in models.members(prompt_cache) if isinstance(c, BlockKVCache))
    return min((c.block for c in caches), default=None)


def observing(model, prompt_cache: list) -> contextlib.AbstractContextManager[None]:
    """Patch the model's attention classes for the block if caches with a budget ask for queries."""
    caches = [c for c in models.members(prompt_cache) if isinstance(c, BlockKVCache)]
    if not any(c.policy.observes for c in caches):
        return contextlib.nullcontext()
    return capture.recording(models.attention_classes(models.attention_layers(model, prompt_cache)))
