"""A prompt's tokens, as callers may give them."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..errors import SnapKVError
from ..models.counts import vocabulary


def token_ids(prompt: mx.array | Sequence[int], may_be_empty: bool = False) -> mx.array:
    """The prompt `(T,)`. Raises: SnapKVError: it is no sequence of token ids, or it is empty and must not be."""
    if isinstance(prompt, str):
        raise SnapKVError("the prompt must be token ids, got a text: encode it with the tokenizer")
    try:
        found = prompt if isinstance(prompt, mx.array) else mx.array(list(prompt))
    except (TypeError, ValueError) as error:
        kind = type(prompt).__name__
        raise SnapKVError(f"the prompt must be one sequence of token ids, got {kind}") from error
    if found.ndim != 1:
        raise SnapKVError(f"the prompt must be one sequence of tokens, got shape {found.shape}")
    if not found.size and not may_be_empty:
        raise SnapKVError("the prompt is empty: give at least one token")
    if found.size and not mx.issubdtype(found.dtype, mx.integer):
        raise SnapKVError(
            f"the prompt must be token ids, which are whole numbers, got {found.dtype}"
        )
    return found


def require_known(tokens: mx.array, model: Any) -> None:
    """Raises: SnapKVError: a token is none of the model's, which would read what is not there."""
    size = vocabulary(model)
    for token in map(int, (tokens.max(), tokens.min()) if tokens.size else ()):
        if not 0 <= token < size:
            raise SnapKVError(
                f"the prompt must have token ids from 0 to {size - 1}, as the model has, got {token}"
            )
