"""Look up a model's sizes, such as its number of heads, which mlx-lm's models store under different names."""

import sys
from typing import Any

import mlx.nn as nn

_HEADS = "n_heads num_heads num_attention_heads n_head q_num_heads".split()
_EXPERTS = "num_experts_per_tok num_experts_per_token top_k moe_top_k moe_topk k".split()


def n_query_heads(attention: Any) -> int:
    """Return the number of query heads, or 0 if unknown."""
    return _first_integer(attention, _HEADS)


def experts_per_token(module: Any) -> int:
    """Return the number of experts per token, or 0 if the module has no experts."""
    return _first_integer(module, _EXPERTS)


def _first_integer(module: Any, attribute_names: list[str]) -> int:
    """Return the value of the first listed attribute that is an integer, or 0."""
    for name in attribute_names:
        value = getattr(module, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return 0


def embedding_modules(model: Any) -> list[nn.Module]:
    """Return a model's embedding modules."""
    classes = (nn.Embedding, nn.QuantizedEmbedding)
    return [module for module in model.modules() if isinstance(module, classes)]


def vocabulary_size(model: Any) -> int:
    """Return the number of token embeddings, or `sys.maxsize` if unknown.

    The tokenizer may know more tokens than that.
    """
    row_counts = [embedding.weight.shape[0] for embedding in embedding_modules(model)]
    return max(row_counts, default=sys.maxsize)


def hidden_size(model: Any) -> int:
    """Return the dimension of the token embeddings. Raises: ValueError: the model has no embedding module."""
    # The weights of a quantised embedding are packed, so they are narrower than its `dims`.
    return min(
        getattr(embedding, "dims", embedding.weight.shape[-1])
        for embedding in embedding_modules(model)
    )
