"""One request, from its first chunk to the end of its answer.

mlx-lm's own `generate_step` drives: it is handed a list of recording caches, and reads that list at every step, so
the compression is a replacement of the list's entries between two of its steps.
"""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from mlx_lm.models.cache import make_prompt_cache

from ..caches.layers import attention_layers, is_compressed, members
from ..caches.memories import recalling_caches
from ..entries.quantization import Quantization
from ..models import attention_classes
from ..models.patch import recording
from ..policies import Policy, Stages
from .loop_model import HookedModel, observing, one_by_one
from .out_of_core import OutOfCoreReader
from .prompt_plan import ProgressCallback, gate
from .readers import InMemoryReader, Reader, RetainingReader
from .report import NO_POLICY, CompressionReport
from .retention import DROP, RetentionConfig

NO_POLICY_REASON = "no policy was given: pass snapkv or policy to compress"


class Request:
    """One request that is compressed, as its `reader` reads and answers it.

    mlx-lm's loop gets `model` and `caches`; `report` says what the compression did, and is empty before.
    """

    def __init__(self, reader: Reader):
        self.reader, self.report, self.plan = reader, reader.report, reader.plan
        self.step_size, self.n_ahead = reader.step_size, reader.plan.n_ahead
        self.model = HookedModel(reader)
        self._observed = attention_classes(reader.model)
        self._started: float | None = None
        self._prefill_seconds: float | None = None
        reader.on_read = self.compress

    @property
    def caches(self) -> list:
        """The list to hand to mlx-lm."""
        return self.reader.caches

    def progress(self, callback: ProgressCallback | None) -> ProgressCallback | None:
        """For mlx-lm's loop: `callback` counts tokens that are read again, too."""
        repetition = self.reader.repetition
        return callback if callback is None or repetition is None else repetition.progress(callback)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Patch the model's attention classes for the block, if queries are asked for."""
        if self._started is None:
            self.reader.require_unchanged()
            self._started = time.perf_counter()
        with recording(self._observed if self.reader.observes else []):
            yield

    def end(self) -> None:
        """The answer has ended: leave the caller's caches ready to go on from."""
        self.reader.end()

    def prompt_is_read(self) -> None:
        """Stop the prefill's clock, if it was started; the first call counts."""
        if self._prefill_seconds is None and self._started is not None:
            self._prefill_seconds = time.perf_counter() - self._started

    def compress(self) -> CompressionReport:
        """Compress `caches`, once, and let the answer begin; what was done.

        Raises:
            SnapKVError: the scores are NaN, or there is no room for the entries that stay.
        """
        if not self.reader.is_compressed:
            self.prompt_is_read()
            self.reader.compress()
            n_again = self.reader.repetition.seconds if self.reader.repetition else 0.0
            self.report.prefill_seconds = (self._prefill_seconds or 0.0) - n_again
            self.report.selection_seconds += n_again
        return self.report


class Uncompressed:
    """A request that is left to mlx-lm as it is, for a reason that its report gives."""

    n_ahead = 0

    def __init__(self, model: Any, prompt_cache: list, report: CompressionReport):
        self._model, self.caches, self.report = model, prompt_cache, report

    @property
    def model(self) -> Any:
        """For mlx-lm's loop: it goes on from caches that evict as if tokens came one by one."""
        return one_by_one(self._model, self.caches)

    def step_size(self, limit: int) -> int:
        return limit

    def progress(self, callback: ProgressCallback | None) -> ProgressCallback | None:
        return callback

    def recording(self) -> contextlib.AbstractContextManager[None]:
        """Patch the model's attention classes for the block, if caches ask for queries."""
        return observing(self._model, self.caches)


def make_request(
    model: Any,
    policy: Policy | Stages | None,
    n_new: int,
    prompt_cache: list | None,
    retention: RetentionConfig = DROP,
    quantization: Quantization | None = None,
    *,
    max_tokens: int = 0,
    turns: bool = False,
    owned: bool = False,
) -> Request | Uncompressed:
    """A request to read `n_new` tokens on a prompt cache: the one place that decides what is compressed, and how.

    Args:
        prompt_cache: None is a new one.
        turns: a cache that holds tokens already is compressed again, as that of a conversation is, unless the policy
            reads a prompt again as a whole.
        owned: the cache was made for this retention; any other is copied into one that is.

    Raises:
        SnapKVError: as `Reader` does, or the prompt is empty.
    """
    wanted = model, policy, n_new, prompt_cache, max_tokens
    reason = reason_for_nothing(*wanted, retention, turns=turns)
    if policy is None or reason is not None:
        held = (getattr(c, "offset", 0) for c in members(prompt_cache or []))
        n_prompt = n_new + (max(held, default=0) if turns else 0)
        report = CompressionReport(str(policy or NO_POLICY), n_prompt, reason)
        return Uncompressed(model, prompt_cache or [], report)
    caches = make_prompt_cache(model) if prompt_cache is None else prompt_cache
    if retention.retains and not owned:
        caches = recalling_caches(model, caches, retention.memory, policy)
    kind: type[Reader] = InMemoryReader
    if retention.retains:
        kind = OutOfCoreReader if policy.reads_in_blocks else RetainingReader
    return Request(kind(model, policy, n_new, caches, retention, quantization))


def reason_for_nothing(
    model: Any,
    policy: Policy | Stages | None,
    n_new: int,
    prompt_cache: list | None,
    max_tokens: int,
    retention: RetentionConfig = DROP,
    *,
    turns: bool = False,
) -> str | None:
    """Why such a request is left to mlx-lm; None if it is compressed. The arguments are `make_request`'s."""
    if policy is None:
        return NO_POLICY_REASON
    goes_on = retention.retains or (turns and policy.stages[1].repeats is None)
    if prompt_cache is None or not goes_on:
        return gate(policy, n_new, prompt_cache, max_tokens)
    if is_compressed(prompt_cache):
        return None
    return gate(policy, held_tokens(model, prompt_cache) + n_new, None, max_tokens)


def held_tokens(model, prompt_cache: list) -> int:
    """Tokens that a prompt cache has read."""
    return attention_layers(model, prompt_cache)[0].entries_in(prompt_cache).offset
