"""Making a request: what carries out its plan."""

import contextlib
from typing import Any

from mlx_lm.models.cache import make_prompt_cache

from ..caches.memories import recalling_caches
from ..planning.prompt_plan import ProgressCallback
from ..planning.request_plan import Plan
from .loop_model import observing, one_by_one
from .readers import InMemoryReader, Request
from .report import NO_POLICY, CompressionReport
from .retaining import RetainingReader
from .sparse import SparseReader


class Uncompressed:
    """A request that is left to mlx-lm as it is, for a reason that its report gives."""

    n_ahead = 0

    def __init__(self, model: Any, prompt_cache: list, report: CompressionReport):
        self._model, self.caches, self.report = model, prompt_cache, report

    @property
    def model(self) -> Any:
        """For mlx-lm's loop: it goes on from caches that evict as if tokens came one by one."""
        return one_by_one(self._model, self.caches)

    @property
    def read_caches(self) -> list:
        return self.caches

    def step_size(self, limit: int) -> int:
        return limit

    def progress(self, callback: ProgressCallback | None) -> ProgressCallback | None:
        return callback

    def recording(self) -> contextlib.AbstractContextManager[None]:
        """Patch the model's attention classes for the block, if caches ask for queries."""
        return observing(self._model, self.caches)


def make_request(
    model: Any, plan: Plan, prompt_cache: list | None = None, *, owned: bool = False
) -> Request | Uncompressed:
    """What carries out a plan on the prompt cache that it was made for; None is a new one.

    Args:
        owned: the cache was made for this memory; any other is copied into one that is.

    Raises: SnapKVError: the caches can't be read on so.
    """
    if plan.reason is not None:
        report = CompressionReport(str(plan.policy or NO_POLICY), plan.n_prompt, plan.reason)
        return Uncompressed(model, prompt_cache or [], report)
    options = plan.options
    caches = make_prompt_cache(model) if prompt_cache is None else prompt_cache
    if not options.retains:
        return InMemoryReader(model, plan, caches)
    if not owned:
        caches = recalling_caches(model, caches, options.memory)
    kind = SparseReader if options.is_sparse else RetainingReader
    return kind(model, plan, caches)
