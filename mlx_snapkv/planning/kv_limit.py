"""The KV memory that a machine has beside a model, and what to do about a request that needs more."""

from ..errors import SnapKVError
from ..models.trained_length import trained_length
from .auto import SPARSE_4BIT, SPARSE_IN_FILES, TYPICAL
from .config import CompressionConfig
from .entry_sizes import weight_bytes
from .footprint import Footprint
from .machine import this_machine

NO_KV_LIMIT = 0  # the value of `--max-kv-bytes` that sets no limit
STEPS = 16  # steps in which `longest_prompt` looks for a length


def machine_kv_limit(footprint: Footprint) -> int:
    """Return the bytes of KV memory that this machine has beside a model's weights and a chunk of the longest prompt.

    Args:
        footprint: computes the memory of the requests.
    """
    model = footprint.sizes.model
    longest = trained_length(model) or TYPICAL
    try:
        chunk = footprint.need(footprint.plan(longest), 0).chunk
    except SnapKVError:  # requests of this length are refused, for another reason
        chunk = 0
    return max(0, this_machine().room - weight_bytes(model) - chunk)


def fits(footprint: Footprint, n_prompt: int, max_tokens: int, limit: int) -> bool:
    """Return whether a request needs no more than `limit` bytes of KV memory; False if it can't be served.

    Args:
        footprint: computes the memory of requests.
        n_prompt: number of tokens of the prompt.
        max_tokens: limit of the answer's tokens.
        limit: bytes of KV memory.
    """
    try:
        return footprint.need(footprint.plan(n_prompt, max_tokens), max_tokens).most <= limit
    except SnapKVError:
        return False


def advice(footprint: Footprint, n_prompt: int, max_tokens: int, limit: int) -> str:
    """Return words about what would make a request fit: entries in fewer bits or in files, or a shorter prompt.

    Args:
        footprint: computes the memory of requests with the options by which this request does not fit.
        n_prompt: number of tokens of the prompt.
        max_tokens: limit of the answer's tokens.
        limit: bytes of KV memory.
    """
    for config in (SPARSE_4BIT, SPARSE_IN_FILES):
        other = _with_config(footprint, config)
        if other is not None and fits(other, n_prompt, max_tokens, limit):
            return f"{config.flags} would fit"
    n = longest_prompt(footprint, n_prompt, max_tokens, limit)
    return f"a prompt of {n:,} tokens would fit" if n else "no prompt would fit"


def longest_prompt(footprint: Footprint, n_prompt: int, max_tokens: int, limit: int) -> int:
    """Return a length up to `n_prompt` tokens, in sixteenths of it, of which a prompt fits; 0 if no length fits."""
    lengths = (n_prompt * step // STEPS for step in range(STEPS - 1, 0, -1))
    return next((n for n in lengths if n and fits(footprint, n, max_tokens, limit)), 0)


def _with_config(footprint: Footprint, config: CompressionConfig) -> Footprint | None:
    """Return a footprint of the same model with other options; None if the model does not support them."""
    try:
        config.require(footprint.sizes.model)
        return Footprint(footprint.sizes, config, footprint.step_size)
    except SnapKVError:
        return None
