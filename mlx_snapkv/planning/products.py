"""Compares the cost of attention with the cost of a model's other matrix products."""

from typing import Any

import mlx.nn as nn

from ..caches.layers import AttentionLayer
from ..models.counts import experts_per_token, hidden_size


def entries_costing(share: float, model: Any, layers: list[AttentionLayer]) -> int:
    """Return how many entries per layer a token can read at a given cost.

    Attention to this number of entries costs `share` times as much as multiplying a token by the weights of all decoder
    layers. The output layer is not counted, because prompt tokens skip it. The number is large if attention is a small
    part of the work, as in large models, mixtures of experts and hybrids. The cost per entry is estimated from the
    attention module's weights. The estimate is slightly too high, because it includes the key and value projections.
    """
    n_products = sum(_n_products(layer) for layer in model.layers)
    n_attention_products = sum(_n_products(reader) for layer in layers for reader in layer.readers)
    # Multiplying a token by all weights takes `n_products` multiplications. A layer's query and output projections take
    # `hidden_size` times as many multiplications as attention to one entry. So attention to one entry in every layer
    # takes about `n_attention_products / hidden_size` multiplications.
    return int(share * hidden_size(model) * n_products / n_attention_products)


def _n_products(module: nn.Module) -> int:
    """Return how many weights each token is multiplied by in a module and its submodules."""
    submodules = module.modules()
    n_experts = max(map(experts_per_token, submodules), default=0)
    n_products = 0
    for submodule in submodules:
        weight = submodule.get("weight")
        if weight is None or weight.ndim < 2:
            continue
        n_weights = weight.size
        if "scales" in submodule:  # quantised weights pack several values into each 32-bit integer
            n_weights = weight.size * 32 // submodule.bits
        if hasattr(submodule, "num_experts"):  # each token uses only some of the experts
            n_weights = n_weights // weight.shape[0] * n_experts
        n_products += n_weights
    return n_products
