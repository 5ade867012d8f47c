"""Count the entries whose attention costs a given share of the model's other multiplications."""

from typing import Any

import mlx.nn as nn

from ..caches.layers import AttentionLayer
from ..models.counts import experts_per_token, hidden_size


def entries_for(share: float, model: Any, layers: list[AttentionLayer]) -> int:
    """Return the number of entries per layer whose attention costs a `share` of a token's products with weights.

    The number is large if attention is a small part of the work, as in large models, mixtures of experts and hybrids.
    The products of an entry are estimated from the weights of the attention module. This is slightly too much, because
    keys and values are computed only once. The output layer is not counted, because prompt tokens do not use it.
    """
    all_products = sum(_products(layer) for layer in model.layers)
    attention_products = sum(_products(reader) for layer in layers for reader in layer.readers)
    # The products of an entry are about those of its attention module, divided by the hidden size.
    return int(share * hidden_size(model) * all_products / attention_products)


def _products(module: nn.Module) -> int:
    """Return a token's products with the weights of a module and its submodules."""
    modules = module.modules()
    experts = max(map(experts_per_token, modules), default=0)
    products = 0
    for x in modules:
        weight = x.get("weight")
        if weight is None or weight.ndim < 2:
            continue
        # A quantised weight is an array of 32-bit integers, each with several values.
        n_weights = weight.size * 32 // x.bits if "scales" in x else weight.size
        if hasattr(x, "num_experts"):  # the first axis; a token uses some of the experts
            n_weights = n_weights // weight.shape[0] * experts
        products += n_weights
    return products
