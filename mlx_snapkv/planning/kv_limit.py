"""Limits on KV memory, and advice for requests that exceed them."""

from collections.abc import Callable
from dataclasses import replace

from ..errors import SnapKVError
from ..models.trained_length import trained_length
from .auto import SPARSE_8BIT, SPARSE_IN_FILES, TYPICAL_PROMPT
from .entry_sizes import weight_bytes
from .footprint import Footprint
from .machine import this_machine

NO_KV_LIMIT = 0  # the value of `--max-kv-bytes` that turns off the limit
N_FRACTIONS = 16  # lengths are tried in steps of 1/N_FRACTIONS of the requested length


def machine_kv_limit(footprint: Footprint) -> int:
    """Return how many bytes of this machine's memory are left for KV entries.

    That is the memory for models, minus MLX's buffer cache, the weights, and the memory for reading a chunk of the
    longest prompt that the model was trained for. If the trained length is unknown, `TYPICAL_PROMPT` is assumed.

    Args:
        footprint: estimates how much memory requests take.
    """
    model = footprint.sizes.model
    max_prompt = trained_length(model) or TYPICAL_PROMPT
    try:
        chunk_bytes = footprint.need(footprint.plan(max_prompt), 0).chunk_bytes
    except SnapKVError:  # requests of this length are rejected for another reason
        chunk_bytes = 0
    return max(0, this_machine().without_buffers - weight_bytes(model) - chunk_bytes)


def request_fits(footprint: Footprint, n_prompt: int, max_tokens: int, limit: int) -> bool:
    """Return whether a request fits in `limit` bytes of KV memory. Unsupported requests never fit.

    Args:
        footprint: estimates how much memory requests take.
        n_prompt: prompt length in tokens.
        max_tokens: maximum answer length in tokens.
        limit: KV memory limit in bytes.
    """
    try:
        plan = footprint.plan(n_prompt, max_tokens)
        return footprint.need(plan, max_tokens).peak_entry_bytes <= limit
    except SnapKVError:
        return False


def advice_to_fit(footprint: Footprint, n_prompt: int, max_tokens: int, limit: int) -> str:
    """Suggest a change that makes a request fit in `limit` bytes of KV memory, or say that none does.

    These changes are tried in order: sparse attention with entries in 8 bits, sparse attention with entries in files, a
    shorter prompt, and a shorter answer. The first that is enough is suggested.

    Args:
        footprint: estimates how much memory requests take. With its config, the request does not fit.
        n_prompt: prompt length in tokens.
        max_tokens: maximum answer length in tokens.
        limit: KV memory limit in bytes.
    """
    for config in (SPARSE_8BIT, SPARSE_IN_FILES):
        if request_fits(replace(footprint, config=config), n_prompt, max_tokens, limit):
            return f"{config.flags} would fit"
    n_fitting = _largest(n_prompt, lambda n: request_fits(footprint, n, max_tokens, limit))
    if n_fitting > 0:
        return f"a prompt of {n_fitting:,} tokens would fit"
    n_fitting = _largest(max_tokens, lambda n: request_fits(footprint, n_prompt, n, limit))
    if n_fitting > 0:
        return f"an answer of {n_fitting:,} tokens would fit (max_tokens)"
    return "no shorter prompt or answer would fit"


def _largest(n_tokens: int, fits: Callable[[int], bool]) -> int:
    """Return the largest length below `n_tokens` that fits, or 0 if none fits.

    Only multiples of `n_tokens / N_FRACTIONS` are tried.
    """
    for numerator in range(N_FRACTIONS - 1, 0, -1):
        n_fewer = n_tokens * numerator // N_FRACTIONS
        if n_fewer > 0 and fits(n_fewer):
            return n_fewer
    return 0
