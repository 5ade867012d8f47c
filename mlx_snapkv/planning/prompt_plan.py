"""The parts of a plan that follow from a setting and a prompt's length: compression, voters, chunk sizes."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..caches.layers import members
from ..compress.options import Compress
from ..compress.policy import Policy
from ..errors import OptionError, SnapKVError
from ..hyperparameters import is_whole
from ..sparse.options import N_VOTERS, Sparse
from .scores import largest_chunk
from .settings import Setting

# Called with the number of processed tokens, and the total.
ProgressCallback = Callable[[int, int], None]

# mlx-lm's defaults:
PREFILL_STEP_SIZE = 2048  # tokens per chunk
MAX_TOKENS = 256  # tokens of an answer

# Chunk sizes are multiples of this where possible. Quantised mixture models are reported to fail at other lengths.
MULTIPLE = 32


def require_step_size(size: Any) -> None:
    """Check that a chunk size is a positive integer; otherwise mlx-lm's loop would not end. Raises: SnapKVError."""
    if size is not None and not (is_whole(size) and size >= 1):
        raise OptionError("prefill_step_size", "a whole number of at least 1", size)


@dataclass(frozen=True)
class PromptPlan:
    """The positions `[first, last)` of a prompt whose queries vote for its entries."""

    n_prompt: int  # tokens of the prompt and of earlier turns
    first: int
    last: int

    @property
    def n_voters(self) -> int:
        """Return the number of queries that vote."""
        return self.last - self.first

    @property
    def n_ahead(self) -> int:
        """Return the number of answer tokens that are fed to the full caches before the compression."""
        return max(1, self.last - self.n_prompt)


def compressed_voters(compress: Compress, n_prompt: int) -> PromptPlan:
    """Return the queries that vote on a prompt of `n_prompt` tokens under a policy.

    With schedule="block" only queries of the recent window vote, because entries before older queries may have been
    evicted.
    """
    n_voters = compress.decode_policy.obs_window
    if compress.evicts_in_blocks:
        n_voters = min(n_voters, max(1, compress.prefill_quota(n_prompt).n_window))
    last = n_prompt + compress.decode_policy.lookahead
    return PromptPlan(n_prompt, max(0, n_prompt - n_voters), last)


def sparse_voters(n_prompt: int) -> PromptPlan:
    """Return the queries of a prompt of `n_prompt` tokens by which sparse attention builds its index."""
    return PromptPlan(n_prompt, max(0, n_prompt - N_VOTERS), n_prompt)


def reason_to_leave(
    setting: Setting, n_prompt: int, prompt_cache: list | None, max_tokens: int = 0
) -> str | None:
    """Return why a prompt is left to mlx-lm; None if it will be compressed or read sparsely.

    Args:
        setting: a policy or sparse attention.
        n_prompt: number of tokens of the prompt.
        prompt_cache: caches that the prompt continues; None for new ones.
        max_tokens: number of answer tokens, which a block policy keeps within the budget, too; -1 for no limit.

    Raises: SnapKVError: the prompt is empty.
    """
    if n_prompt == 0:
        raise SnapKVError("the prompt is empty: give at least one token")
    # All layers are checked, because the first layer of a hybrid model may have a cache without an offset.
    if not all(cache.empty() for cache in members(prompt_cache or [])):
        return "the prompt cache already holds tokens; only an empty one is compressed"
    if isinstance(setting, Sparse):
        return _sparse_reason(setting, n_prompt)
    return _compress_reason(setting, n_prompt, max_tokens)


def _sparse_reason(sparse: Sparse, n_prompt: int) -> str | None:
    """Return why a prompt is not read sparsely: the budget is less than one entry, or the prompt fits it."""
    try:
        sparse.quota(n_prompt)
    except SnapKVError as error:
        return f"a share of the prompt's {n_prompt} tokens is too little: {error}"
    if not sparse.fits(n_prompt):
        return None
    budget = sparse.budget or sparse.entries(n_prompt)
    return f"the prompt's {n_prompt} entries fit the budget of {budget}; lower it to read fewer"


def _compress_reason(compress: Compress, n_prompt: int, max_tokens: int) -> str | None:
    """Return why a prompt is not compressed: it is short, fits the budget, or the budget is less than one entry."""
    min_ctx = compress.policy.min_ctx
    if n_prompt < min_ctx:
        return (
            f"the prompt's {n_prompt} tokens are below min_ctx={min_ctx}; "
            "set min_ctx=0 to force compression"
        )
    if any(isinstance(policy.budget, str) for policy in compress.policies):
        try:
            compress.prefill_quota(n_prompt)
        except SnapKVError as error:
            return f"a share of the prompt's {n_prompt} tokens is too little: {error}"
    if not compress.fits(n_prompt):
        return None
    # Block policies also evict during the answer, unless it fits as well.
    answer_fits = max_tokens >= 0 and compress.fits(n_prompt + max_tokens)
    if compress.decode_policy.schedule == "once" or answer_fits:
        return fits_reason(n_prompt, compress.policy)
    return None


def fits_reason(n_prompt: int, policy: Policy) -> str:
    """Return the sentence for a prompt that fits a policy's budget."""
    parts = " (n_sink + top_k + n_window)" if policy.name == "snapkv" else ""
    return (
        f"the prompt's {n_prompt} entries fit the budget of {policy.budget}{parts}; "
        "lower it to compress"
    )


def compressed_chunk_size(
    compress: Compress, limit: int | None, plan: PromptPlan, n_new: int
) -> int:
    """Return the number of tokens per chunk: at most `limit`, and a policy's `prefill_chunk` or `block`.

    With schedule="once" the queries that vote are in a short last chunk. Otherwise all queries of a long chunk would
    stay in memory until a few of them were copied. This way, prefill needs no more memory than mlx-lm's. A prompt of
    one chunk is not split. If the scores of a chunk would take too much memory, the model reads it in pieces; see
    `scores`.

    Args:
        compress: the policies for prompt and answer.
        limit: the caller's `prefill_step_size`; None for no limit.
        plan: where the voting queries begin (`first`), and the length of the prompt.
        n_new: number of prompt tokens that have not been read.
    """
    policy = compress.policy
    if compress.evicts_in_blocks:
        return min(limit or policy.block, policy.block)
    largest = largest_chunk()
    size = policy.prefill_chunk or min(limit or largest, largest)
    return size_before_voters(size, plan, n_new) if policy.observes else size


def size_before_voters(size: int, plan: PromptPlan, n_new: int) -> int:
    """Return a chunk size near `size` for which the last chunk holds little more than the voting queries.

    A large multiple of `MULTIPLE` is reduced in steps of `MULTIPLE`. Any other size divides the tokens before the
    voting queries evenly.

    Args:
        size: maximum number of tokens per chunk.
        plan: where the voting queries begin (`first`), and the length of the prompt.
        n_new: number of prompt tokens that have not been read.
    """
    n_read = plan.n_prompt - n_new
    n_before_voters = plan.first - n_read
    if n_new - 1 <= size or not 0 < n_before_voters < n_new:  # one chunk, or no boundary to choose
        return size
    if size % MULTIPLE == 0 and size >= 8 * MULTIPLE:
        sizes = range(size, size // 2 - 1, -MULTIPLE)
        return min(sizes, key=lambda chunk: n_before_voters % chunk)
    n_chunks = math.ceil(n_before_voters / size)
    return n_before_voters // n_chunks
