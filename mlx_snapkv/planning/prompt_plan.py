"""What a policy decides about a prompt of some length: whether to compress it, who votes, in which chunks.

`plan_request` asks here for every way in, so that the same prompt and policy keep the same entries.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..caches.layers import members
from ..errors import OptionError, SnapKVError
from ..policies import Method, Stages
from ..policies.budgets import is_whole
from .scores import largest_chunk

ProgressCallback = Callable[[int, int], None]  # tokens processed, and their total

# mlx-lm's own defaults:
PREFILL_STEP_SIZE = 2048  # tokens of a chunk
MAX_TOKENS = 256  # of an answer

# Chunks are multiples of this where they may be: quantised mixture models are reported to go wrong at other lengths.
MULTIPLE = 32


def require_step_size(size: Any) -> None:
    """Raises: SnapKVError: mlx-lm's loop would not end, or not begin, with chunks of this size."""
    if size is not None and not (is_whole(size) and size >= 1):
        raise OptionError("prefill_step_size", "a whole number of at least 1", size)


@dataclass(frozen=True)
class PromptPlan:
    """The positions that matter in a prompt: the queries of `[first, last)` vote for its entries."""

    n_prompt: int  # its tokens, those of earlier turns included
    first: int
    last: int

    @property
    def n_voters(self) -> int:
        return self.last - self.first

    @property
    def n_ahead(self) -> int:
        """Answer tokens that are fed on the full entries before they are compressed."""
        return max(1, self.last - self.n_prompt)


def plan_prompt(policy: Method | Stages, n_prompt: int) -> PromptPlan:
    """Who votes on a prompt.

    Where entries are evicted meanwhile, only the queries of the recent window vote, since what came after an older
    one's own entry may be gone.
    """
    _, decode_policy = policy.stages
    n_voters = decode_policy.obs_window
    if policy.reads_in_blocks:
        n_voters = min(n_voters, max(1, policy.prefill_quota(n_prompt).n_window))
    return PromptPlan(n_prompt, max(0, n_prompt - n_voters), n_prompt + decode_policy.lookahead)


def gate(
    policy: Method | Stages, n_prompt: int, prompt_cache: list | None, max_tokens: int = 0
) -> str | None:
    """Why a prompt is left as it is; None if it is to be compressed. SnapKVError if it is empty.

    A block policy keeps the answer's `max_tokens`, without an end if they are -1, within the budget, too.
    """
    if n_prompt == 0:
        raise SnapKVError("the prompt is empty: give at least one token")
    # Every layer is asked: in a hybrid the first one is not a KV cache and has no offset.
    if not all(cache.empty() for cache in members(prompt_cache or [])):
        return "the prompt cache already holds tokens; only an empty one is compressed"
    if n_prompt < policy.min_ctx:
        return (
            f"the prompt's {n_prompt} tokens are below min_ctx={policy.min_ctx}; "
            "set min_ctx=0 to force compression"
        )
    if any(isinstance(stage.budget, str) for stage in policy.stages):
        try:
            policy.prefill_quota(n_prompt)
        except SnapKVError as error:
            return f"a share of the prompt's {n_prompt} tokens is too little: {error}"
    answer_fits = max_tokens >= 0 and policy.fits(n_prompt + max_tokens)
    stays = policy.stages[1].schedule == "once" or answer_fits
    return fits_reason(n_prompt, policy) if policy.fits(n_prompt) and stays else None


def fits_reason(n: int, policy: Method | Stages) -> str:
    prefill_policy, _ = policy.stages
    parts = " (n_sink + top_k + n_window)" if prefill_policy.name == "snapkv" else ""
    budget = prefill_policy.budget or prefill_policy.quota(n).entries
    purpose = "compress" if prefill_policy.evicts else "read fewer"
    return f"the prompt's {n} entries fit the budget of {budget}{parts}; lower it to {purpose}"


def chunk_size(policy: Method | Stages, limit: int | None, plan: PromptPlan, n_new: int) -> int:
    """Tokens to read at a time: at most `limit`, a policy's `prefill_chunk`, or its `block` where it evicts meanwhile.

    Where it doesn't, the size leaves the voters to a short last chunk, so that the queries of a whole chunk never wait,
    in the middle of its attention, for a few of them to be copied: at most the memory of mlx-lm's own prefill is
    needed. A prompt of one chunk stays one; `n_new` of its tokens are still to be read. Where chunks choose what they
    read, the last tokens come in a call of their own anyway. The model reads a chunk in pieces where its scores would
    take too much memory; see `scores`.
    """
    prefill_policy, _ = policy.stages
    if policy.reads_in_blocks:
        return min(limit or prefill_policy.block, prefill_policy.block)
    largest = largest_chunk()
    size = prefill_policy.prefill_chunk or min(limit or largest, largest)
    if policy.reads_little:
        return size
    n_before = plan.first - (plan.n_prompt - n_new)
    if n_new - 1 <= size or not 0 < n_before < n_new or not prefill_policy.observes:
        return size
    # Chunks of a size, near the one asked for, that ends where the voters begin, or little before.
    if size % MULTIPLE == 0 and size >= 8 * MULTIPLE:
        return min(range(size, size // 2 - 1, -MULTIPLE), key=lambda n: n_before % n)
    return n_before // -(-n_before // size)
