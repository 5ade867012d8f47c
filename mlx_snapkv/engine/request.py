"""Making a request: the one place that decides what is compressed, and how."""

import contextlib
from typing import Any

from mlx_lm.models.cache import make_prompt_cache

from ..caches.layers import attention_layers, is_compressed, members
from ..caches.memories import recalling_caches
from ..planning.config import CompressionConfig
from ..planning.prompt_plan import ProgressCallback, gate
from .loop_model import observing, one_by_one
from .readers import InMemoryReader, Request
from .report import NO_POLICY, CompressionReport
from .retaining import RetainingReader
from .sparse import SparseReader

NO_POLICY_REASON = "no policy was given: pass snapkv or policy to compress"


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
    model: Any,
    config: CompressionConfig,
    n_new: int,
    prompt_cache: list | None,
    *,
    max_tokens: int = 0,
    owned: bool = False,
) -> Request | Uncompressed:
    """A request to read `n_new` tokens on a prompt cache.

    Args:
        prompt_cache: None is a new one.
        owned: the cache was made for this memory; any other is copied into one that is.

    Raises: SnapKVError: as `Request` does, or the prompt is empty.
    """
    policy = config.policy
    reason = reason_for_nothing(model, config, n_new, prompt_cache, max_tokens)
    if policy is None or reason is not None:
        held = (getattr(c, "offset", 0) for c in members(prompt_cache or []))
        n_prompt = n_new + (max(held, default=0) if config.turns else 0)
        report = CompressionReport(str(policy or NO_POLICY), n_prompt, reason)
        return Uncompressed(model, prompt_cache or [], report)
    caches = make_prompt_cache(model) if prompt_cache is None else prompt_cache
    if not config.retains:
        return InMemoryReader(model, config, n_new, caches)
    if not owned:
        caches = recalling_caches(model, caches, config.memory)
    kind = SparseReader if config.is_sparse else RetainingReader
    return kind(model, config, n_new, caches)


def reason_for_nothing(
    model: Any,
    config: CompressionConfig,
    n_new: int,
    prompt_cache: list | None,
    max_tokens: int = 0,
) -> str | None:
    """Why such a request is left to mlx-lm; None if it is compressed. The arguments are `make_request`'s."""
    policy = config.policy
    if policy is None:
        return NO_POLICY_REASON
    goes_on = config.retains or (config.turns and policy.stages[1].repeats is None)
    if prompt_cache is None or not goes_on:
        return gate(policy, n_new, prompt_cache, max_tokens)
    if is_compressed(prompt_cache):
        return None
    return gate(policy, held_tokens(model, prompt_cache) + n_new, None, max_tokens)


def held_tokens(model, prompt_cache: list) -> int:
    """Tokens that a prompt cache has read."""
    return attention_layers(model, prompt_cache)[0].entries_in(prompt_cache).offset
