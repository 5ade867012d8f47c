"""Compares the cost of attention with the cost of a model's other matrix products."""

from typing import Any

import mlx.nn as nn

from ..caches.layers import AttentionLayer
from ..models.counts import experts_per_token, hidden_size


def entries_for(share: float, model: Any, layers: list[AttentionLayer]) -> int:
    """Return the number of entries per layer at which attention costs `share` of a token's products with weights.

    The number is large for models in which attention is a small part of the work, such as large models, mixtures of
    experts and hybrids. The cost per entry is estimated from the attention module's weights, which is slightly too
    high, because keys and values are computed only once. The output layer is not counted: prompt tokens skip it.
    """
    all_products = sum(_products(layer) for layer in model.layers)
    attention_products = sum(_products(reader) for layer in layers for reader in layer.readers)
    # The cost per entry is about the number of attention weights divided by the hidden size.
    return int(share * hidden_size(model) * all_products / attention_products)


def _products(module: nn.Module) -> int:
    """Return how many weights of a module and its submodules a token is multiplied with."""
    modules = module.modules()
    experts = max(map(experts_per_token, modules), default=0)
    products = 0
    for x in modules:
        weight = x.get("weight")
        if weight is None or weight.ndim < 2:
            continue
        # Quantised weights pack several values into each 32-bit integer.
        n_weights = weight.size * 32 // x.bits if "scales" in x else weight.size
        if hasattr(x, "num_experts"):  # the first axis; each token uses only some of the experts
            n_weights = n_weights // weight.shape[0] * experts
        products += n_weights
    return products
