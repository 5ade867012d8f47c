"""Decides, without a model, which prompts to compress, which queries vote, and the chunk sizes."""

import math
from collections.abc import Callable
from typing import Any

from ..caches.layers import all_caches
from ..compress.options import Compress
from ..compress.policy import Policy
from ..entries.quota import Quota
from ..errors import OptionError, SnapKVError
from ..hyperparameters import is_whole
from ..sparse.options import Sparse
from .scores import largest_chunk
from .settings import Setting

# Called with the number of tokens processed so far and the total.
ProgressCallback = Callable[[int, int], None]

# mlx-lm's defaults:
PREFILL_STEP_SIZE = 2048  # tokens per chunk
MAX_TOKENS = 256  # tokens per answer

# Chunk sizes are multiples of this where possible. Quantised mixture-of-experts models reportedly fail at other
# lengths.
MULTIPLE = 32


def require_step_size(size: Any) -> None:
    """Check that a chunk size is None or a positive integer. With 0, mlx-lm would loop forever. Raises: SnapKVError."""
    if size is not None and not (is_whole(size) and size >= 1):
        raise OptionError("prefill_step_size", "a whole number of at least 1", size)


def policy_voters(compress: Compress, n_prompt: int) -> range:
    """Return the positions of the queries that vote when a policy compresses a prompt of `n_prompt` tokens.

    With schedule="block", only queries in the recent window vote, because entries that older queries attended to may
    already have been evicted.
    """
    n_voters = compress.decode_policy.obs_window
    if compress.evicts_in_blocks:
        n_voters = min(n_voters, max(1, compress.prefill_quota(n_prompt).n_window))
    return range(max(0, n_prompt - n_voters), n_prompt + compress.decode_policy.lookahead)


def reason_to_leave(
    setting: Setting, n_prompt: int, prompt_cache: list | None, max_tokens: int = 0
) -> str | None:
    """Return why a prompt is left to mlx-lm, or None if it will be compressed or use sparse attention.

    Args:
        setting: policies or sparse attention.
        n_prompt: prompt length in tokens.
        prompt_cache: the caches that the prompt continues from, or None for new ones.
        max_tokens: maximum answer length in tokens, or -1 for no limit. It only matters for policies that also evict
            during the answer (schedule="block").

    Raises: SnapKVError: the prompt is empty.
    """
    if n_prompt == 0:
        raise SnapKVError("the prompt is empty: give at least one token")
    # Check all caches, because some layers leave their cache empty.
    if not all(cache.empty() for cache in all_caches(prompt_cache or [])):
        return "the prompt cache already holds tokens; only an empty one is compressed"
    if isinstance(setting, Sparse):
        return _sparse_reason(setting, n_prompt)
    return _compress_reason(setting, n_prompt, max_tokens)


def _sparse_reason(sparse: Sparse, n_prompt: int) -> str | None:
    """Return why a prompt does not use sparse attention, or None if it does."""
    budget_problem = _budget_problem(sparse.quota, n_prompt)
    if budget_problem is not None:
        return budget_problem
    if not sparse.fits(n_prompt):
        return None
    budget = sparse.budget or sparse.entries(n_prompt)
    return f"the prompt's {n_prompt} entries fit the budget of {budget}; lower it to read fewer"


def _compress_reason(compress: Compress, n_prompt: int, max_tokens: int) -> str | None:
    """Return why a policy does not compress a prompt, or None if it does."""
    too_short = too_short_reason(compress, n_prompt)
    if too_short is not None:
        return too_short
    if any(isinstance(policy.budget, str) for policy in compress.policies):
        budget_problem = _budget_problem(compress.prefill_quota, n_prompt)
        if budget_problem is not None:
            return budget_problem
    if not compress.fits(n_prompt):
        return None
    # The prompt fits. Policies with schedule="block" also evict during the answer, unless the answer fits as well.
    evicts_during_answer = compress.decode_policy.schedule == "block"
    answer_fits = max_tokens >= 0 and compress.fits(n_prompt + max_tokens)
    if evicts_during_answer and not answer_fits:
        return None
    return uncompressed_reason(n_prompt, compress.policy)


def too_short_reason(compress: Compress, n_prompt: int) -> str | None:
    """Explain why a prompt is too short to be compressed, or return None if it is long enough."""
    min_ctx = max(policy.min_ctx for policy in compress.policies)
    if n_prompt >= min_ctx:
        return None
    return f"the prompt's {n_prompt} tokens are below min_ctx={min_ctx}; set min_ctx=0 to force compression"


def _budget_problem(compute_quota: Callable[[int], Quota], n_prompt: int) -> str | None:
    """Return why a share of the prompt is too small as a budget, or None if it is large enough."""
    try:
        compute_quota(n_prompt)
    except SnapKVError as error:
        return f"a share of the prompt's {n_prompt} tokens is too little: {error}"
    return None


def uncompressed_reason(n_prompt: int, policy: Policy) -> str:
    """Explain why a prompt that fits a policy's budget is not compressed."""
    budget_parts = " (n_sink + top_k + n_window)" if policy.name == "snapkv" else ""
    return (
        f"the prompt's {n_prompt} entries fit the budget of {policy.budget}{budget_parts}; "
        "lower it to compress"
    )


def policy_chunk_size(
    compress: Compress, step_size: int | None, n_new: int, n_before_voters: int
) -> int:
    """Return the chunk size for a request with a policy.

    With schedule="block", the size is `step_size`, capped at the policy's `block`.

    With schedule="once", the size is the policy's `prefill_chunk` or, by default, `step_size` capped at
    `largest_chunk()`. If queries vote, the size is adjusted so that the voting queries are in a short last chunk. If
    the last chunk were long, all of its queries would stay in memory until the voting queries had been copied, and
    prefill would need more memory than in mlx-lm. A prompt that fits in one chunk is not split. Chunks whose scores
    would take too much memory are read in pieces; see `engine/pieces.py`.

    Args:
        compress: the policies for prompt and answer.
        step_size: the caller's `prefill_step_size`, or None for no limit.
        n_new: number of prompt tokens still to read.
        n_before_voters: how many of these tokens come before the voting queries.
    """
    policy = compress.policy
    if compress.evicts_in_blocks:
        return min(step_size or policy.block, policy.block)
    max_size = policy.prefill_chunk or max_chunk_size(step_size)
    if not policy.observes:
        return max_size
    return align_chunks_to_voters(max_size, n_new, n_before_voters)


def max_chunk_size(step_size: int | None) -> int:
    """Return the caller's `prefill_step_size`, capped at `largest_chunk()`."""
    largest = largest_chunk()
    return min(step_size or largest, largest)


def align_chunks_to_voters(max_size: int, n_new: int, n_before_voters: int) -> int:
    """Return a chunk size for which the last chunk has few tokens before the voting queries.

    If `max_size` is a large multiple of `MULTIPLE`, the result is also a multiple of `MULTIPLE`. Otherwise, the tokens
    before the voting queries are divided into equal chunks.

    Args:
        max_size: maximum number of tokens per chunk.
        n_new: number of prompt tokens still to read.
        n_before_voters: how many of these tokens come before the voting queries.
    """
    is_one_chunk = n_new - 1 <= max_size
    voters_begin_in_new_tokens = 0 < n_before_voters < n_new
    if is_one_chunk or not voters_begin_in_new_tokens:
        return max_size
    is_large_multiple = max_size % MULTIPLE == 0 and max_size >= 8 * MULTIPLE
    if is_large_multiple:
        # Choose the size that leaves the fewest tokens between the start of the last chunk and the voting queries.
        sizes = range(max_size, max_size // 2 - 1, -MULTIPLE)
        return min(sizes, key=lambda size: n_before_voters % size)
    n_chunks = math.ceil(n_before_voters / max_size)
    return n_before_voters // n_chunks
