"""The KV memory that a machine has in addition to a model, and advice for requests that need more."""

from ..errors import SnapKVError
from ..models.trained_length import trained_length
from .auto import SPARSE_4BIT, SPARSE_IN_FILES, TYPICAL
from .config import CompressionConfig
from .entry_sizes import weight_bytes
from .footprint import Footprint
from .machine import this_machine

NO_KV_LIMIT = 0  # value of `--max-kv-bytes` for no limit
STEPS = 16  # number of lengths among which `longest_prompt` searches


def machine_kv_limit(footprint: Footprint) -> int:
    """Return the KV memory in bytes that this machine has in addition to weights and a chunk of the longest prompt.

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
    """Return whether a request needs at most `limit` bytes of KV memory; False if it is not supported.

    Args:
        footprint: estimates the memory of requests.
        n_prompt: number of tokens of the prompt.
        max_tokens: maximum number of tokens in the answer.
        limit: bytes of KV memory.
    """
    try:
        return (
            footprint.need(footprint.plan(n_prompt, max_tokens), max_tokens).peak_entries <= limit
        )
    except SnapKVError:
        return False


def advice(footprint: Footprint, n_prompt: int, max_tokens: int, limit: int) -> str:
    """Return advice that would make a request fit: entries in fewer bits or in files, or a shorter prompt.

    Args:
        footprint: estimates the memory of requests, with the options by which this request does not fit.
        n_prompt: number of tokens of the prompt.
        max_tokens: maximum number of tokens in the answer.
        limit: bytes of KV memory.
    """
    for config in (SPARSE_4BIT, SPARSE_IN_FILES):
        other = _with_config(footprint, config)
        if other is not None and fits(other, n_prompt, max_tokens, limit):
            return f"{config.flags} would fit"
    n = longest_prompt(footprint, n_prompt, max_tokens, limit)
    return f"a prompt of {n:,} tokens would fit" if n else "no prompt would fit"


def longest_prompt(footprint: Footprint, n_prompt: int, max_tokens: int, limit: int) -> int:
    """Return a prompt length that fits, a multiple of 1/16 of `n_prompt`; 0 if none fits."""
    lengths = (n_prompt * step // STEPS for step in range(STEPS - 1, 0, -1))
    return next((n for n in lengths if n and fits(footprint, n, max_tokens, limit)), 0)


def _with_config(footprint: Footprint, config: CompressionConfig) -> Footprint | None:
    """Return a footprint with other options; None if the model does not support them."""
    try:
        config.require(footprint.sizes.model)
        return Footprint(footprint.sizes, config, footprint.step_size)
    except SnapKVError:
        return None
