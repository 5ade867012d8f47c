"""Validates token ids, and finds the common prefix of prompts."""

from collections.abc import Collection, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.utils import common_prefix_len

from ..errors import SnapKVError
from ..models.counts import vocabulary_size


def token_ids(prompt: mx.array | Sequence[int], may_be_empty: bool = False) -> mx.array:
    """Convert the prompt to an array `(T,)`.

    Raises: SnapKVError: the prompt is not a sequence of token ids, or is empty although `may_be_empty` is false.
    """
    if isinstance(prompt, str):
        raise SnapKVError("the prompt must be token ids, got a text: encode it with the tokenizer")
    try:
        tokens = prompt if isinstance(prompt, mx.array) else mx.array(list(prompt))
    except (TypeError, ValueError) as error:
        kind = type(prompt).__name__
        raise SnapKVError(f"the prompt must be one sequence of token ids, got {kind}") from error
    if tokens.ndim != 1:
        raise SnapKVError(f"the prompt must be one sequence of tokens, got shape {tokens.shape}")
    if not tokens.size and not may_be_empty:
        raise SnapKVError("the prompt is empty: give at least one token")
    if tokens.size and not mx.issubdtype(tokens.dtype, mx.integer):
        raise SnapKVError(
            f"the prompt must be token ids, which are whole numbers, got {tokens.dtype}"
        )
    return tokens


def require_known_tokens(tokens: mx.array, model: Any) -> None:
    """Check that all token ids are in the model's vocabulary. Raises: SnapKVError."""
    extreme_tokens = [int(tokens.max()), int(tokens.min())] if tokens.size else []
    require_in_vocabulary("the prompt", extreme_tokens, vocabulary_size(model))


def require_in_vocabulary(what: str, tokens: Collection[int], size: int) -> None:
    """Check that all token ids are in `[0, size)`. Raises: SnapKVError.

    MLX has no bounds check and would read outside the embedding table.
    """
    for token in (max(tokens), min(tokens)) if tokens else ():
        if not 0 <= token < size:
            raise SnapKVError(f"{what} must have token ids from 0 to {size - 1}, got {token}")


def common_prefix(prompts: Sequence[Sequence[Any]]) -> int:
    """Return the length of the longest common prefix of all prompts."""
    first, *others = prompts
    return min((common_prefix_len(first, other) for other in others), default=len(first))
