"""Look up sizes that mlx-lm's models store under different names: query heads, experts, vocabulary, hidden size."""

import sys
from typing import Any

import mlx.nn as nn

_HEADS = "n_heads num_heads num_attention_heads n_head q_num_heads".split()
_EXPERTS = "num_experts_per_tok num_experts_per_token top_k moe_top_k moe_topk k".split()


def n_query_heads(attention: Any) -> int:
    """Return the number of query heads, or 0 if unknown."""
    return _first(attention, _HEADS)


def experts_per_token(module: Any) -> int:
    """Return the number of experts per token, or 0 if the module has no experts."""
    return _first(module, _EXPERTS)


def _first(module: Any, names: list[str]) -> int:
    """Return the value of the first listed attribute that is an integer, or 0."""
    values = (getattr(module, name, None) for name in names)
    return next((n for n in values if isinstance(n, int) and not isinstance(n, bool)), 0)


def embedding_modules(model: Any) -> list[nn.Module]:
    """Return a model's embedding modules."""
    return [x for x in model.modules() if isinstance(x, (nn.Embedding, nn.QuantizedEmbedding))]


def vocabulary_size(model: Any) -> int:
    """Return the number of token embeddings, or `sys.maxsize` if unknown. A tokenizer may have more tokens."""
    return max((x.weight.shape[0] for x in embedding_modules(model)), default=sys.maxsize)


def hidden_size(model: Any) -> int:
    """Return the dimension of the token embeddings."""
    return min(getattr(x, "dims", x.weight.shape[-1]) for x in embedding_modules(model))
