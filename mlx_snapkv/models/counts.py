"""How many query heads and experts mlx-lm's modules have, whatever they call them, and how wide a model is."""

import sys
from typing import Any

import mlx.nn as nn

_HEADS = "n_heads num_heads num_attention_heads n_head q_num_heads".split()
_EXPERTS = "num_experts_per_tok num_experts_per_token top_k moe_top_k moe_topk k".split()


def query_heads(attention: Any) -> int:
    return _first(attention, _HEADS)


def experts_per_token(module: Any) -> int:
    """The experts that a token goes to; 0 if the module does not say."""
    return _first(module, _EXPERTS)


def _first(module: Any, names: list[str]) -> int:
    found = (getattr(module, name, None) for name in names)
    return next((n for n in found if isinstance(n, int) and not isinstance(n, bool)), 0)


def tables(model: Any) -> list[nn.Module]:
    """A model's embeddings."""
    return [x for x in model.modules() if isinstance(x, (nn.Embedding, nn.QuantizedEmbedding))]


def vocabulary(model: Any) -> int:
    """How many tokens a model has embeddings of, perhaps fewer than its tokenizer; any number if it has no table."""
    return max((x.weight.shape[0] for x in tables(model)), default=sys.maxsize)


def hidden_size(model: Any) -> int:
    return min(getattr(x, "dims", x.weight.shape[-1]) for x in tables(model))
