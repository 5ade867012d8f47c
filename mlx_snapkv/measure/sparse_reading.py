"""Read a prompt for sparse attention, from the full caches of a shared reading if possible."""

from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache

from ..engine.prefill import prefill, read
from ..engine.report import CompressionReport
from ..engine.request import Request
from ..planning.config import CompressionConfig
from ..planning.prompt_plan import PREFILL_STEP_SIZE
from ..planning.request_plan import plan_request
from ..planning.settings import Setting
from ..sparse.options import N_VOTERS, Sparse
from ..sparse.prompt_caches import reads_sparsely
from .reading import Reading


def starts_from_full_cache(setting: Setting | None) -> bool:
    """Return whether a setting is sparse attention that can continue from full caches, as a later turn does."""
    return isinstance(setting, Sparse) and setting.store == "memory" and not reads_sparsely(setting)


def read_for_sparse(
    reading: Reading, sparse: Sparse, later_tokens: Sequence[int] = ()
) -> tuple[list, CompressionReport]:
    """Read a prompt with sparse attention. Return the caches to decode an answer from, and the report.

    If possible, continue from the prompt's full cache, and only read its last tokens again.

    Args:
        reading: the prompt, read into full caches.
        sparse: sparse attention options.
        later_tokens: tokens to read after the prompt, as the next turn of a conversation. If there are any, the report
            is about that turn.
    """
    model = reading.model
    earlier_cache, unread = _start_for_sparse(reading, sparse, later_tokens)
    plan = plan_request(model, CompressionConfig(sparse), len(unread), earlier_cache)
    options = {"prefill_step_size": plan.chunk_size(PREFILL_STEP_SIZE)}
    if plan.is_left_to_mlx_lm:
        caches = earlier_cache or make_prompt_cache(model)
        read(model, mx.array(list(unread)), caches, options)
        return caches, CompressionReport.of_full_cache(plan)
    request = Request(model, plan, earlier_cache)
    with request.recording():
        read(request.model, mx.array(list(unread)), request.caches, options)
    report = request.compress()
    return request.caches, report


def _start_for_sparse(
    reading: Reading, sparse: Sparse, later_tokens: Sequence[int]
) -> tuple[list | None, Sequence[int]]:
    """Return the caches that `read_for_sparse` starts from, or None for new ones, and the tokens to read."""
    tokens = reading.tokens
    if starts_from_full_cache(sparse):
        full_caches = reading.full_cache()
        if later_tokens:
            return full_caches, later_tokens
        if len(tokens) > N_VOTERS and can_trim_prompt_cache(full_caches):
            # The last queries are needed for the index and the residual.
            trim_prompt_cache(full_caches, N_VOTERS)
            return full_caches, tokens[-N_VOTERS:]
    elif later_tokens:
        earlier_cache, _ = prefill(reading.model, tokens, sparse=sparse)
        return earlier_cache, later_tokens
    return None, tokens
