"""Limits on KV memory, and advice for requests that exceed them."""

from ..errors import SnapKVError
from ..models.trained_length import trained_length
from .auto import SPARSE_4BIT, SPARSE_IN_FILES, TYPICAL
from .config import CompressionConfig
from .entry_sizes import weight_bytes
from .footprint import Footprint
from .machine import this_machine

NO_KV_LIMIT = 0  # the value of `--max-kv-bytes` that turns off the limit
STEPS = 16  # `longest_prompt` tries multiples of 1/16 of a prompt's length


def machine_kv_limit(footprint: Footprint) -> int:
    """Return how many bytes this machine has left for KV memory.

    The weights and one chunk of the longest prompt are subtracted from the memory for models.

    Args:
        footprint: estimates the memory of requests.
    """
    model = footprint.sizes.model
    longest = trained_length(model) or TYPICAL
    try:
        chunk = footprint.need(footprint.plan(longest), 0).chunk
    except SnapKVError:  # requests of this length are rejected for another reason
        chunk = 0
    return max(0, this_machine().room - weight_bytes(model) - chunk)


def fits(footprint: Footprint, n_prompt: int, max_tokens: int, limit: int) -> bool:
    """Return whether a request fits in `limit` bytes of KV memory. Unsupported requests never fit.

    Args:
        footprint: estimates the memory of requests.
        n_prompt: prompt length in tokens.
        max_tokens: maximum answer length in tokens.
        limit: KV memory limit in bytes.
    """
    try:
        return (
            footprint.need(footprint.plan(n_prompt, max_tokens), max_tokens).peak_entries <= limit
        )
    except SnapKVError:
        return False


def advice(footprint: Footprint, n_prompt: int, max_tokens: int, limit: int) -> str:
    """Suggest how to make a request fit: store entries in fewer bits or in files, or shorten the prompt.

    Args:
        footprint: estimates the memory of requests, with the config that makes this request too large.
        n_prompt: prompt length in tokens.
        max_tokens: maximum answer length in tokens.
        limit: KV memory limit in bytes.
    """
    for config in (SPARSE_4BIT, SPARSE_IN_FILES):
        other = _with_config(footprint, config)
        if other is not None and fits(other, n_prompt, max_tokens, limit):
            return f"{config.flags} would fit"
    n = longest_prompt(footprint, n_prompt, max_tokens, limit)
    return f"a prompt of {n:,} tokens would fit" if n else "no prompt would fit"


def longest_prompt(footprint: Footprint, n_prompt: int, max_tokens: int, limit: int) -> int:
    """Return the longest prompt that fits, as a multiple of 1/16 of `n_prompt`. Return 0 if none fits."""
    lengths = (n_prompt * step // STEPS for step in range(STEPS - 1, 0, -1))
    return next((n for n in lengths if n and fits(footprint, n, max_tokens, limit)), 0)


def _with_config(footprint: Footprint, config: CompressionConfig) -> Footprint | None:
    """Return a copy of the footprint with another config, or None if the model does not support the config."""
    try:
        config.require(footprint.sizes.model)
        return Footprint(footprint.sizes, config, footprint.step_size)
    except SnapKVError:
        return None
