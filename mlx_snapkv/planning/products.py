"""How many entries a token can attend to for a share of what else the model multiplies for it."""

from typing import Any

import mlx.nn as nn

from ..caches.layers import AttentionLayer
from ..models.counts import experts_per_token, hidden_size


def entries_for(share: float, model: Any, layers: list[AttentionLayer]) -> int:
    """Entries that each of `layers` can read for every token at so large a share of the products with weights.

    Where attention is little of the work, as it is in large models, in mixtures of experts and in hybrids, many are
    cheap. An entry is taken to cost what its attention module's weights do for each of a token's numbers: a little too
    much, since keys and values are computed once. A prompt's tokens don't go through the output layer.
    """
    readers = (reader for layer in layers for reader in layer.readers)
    of_attention = sum(map(_products, readers))
    return int(share * hidden_size(model) * sum(map(_products, model.layers)) / of_attention)


def _products(module: nn.Module) -> int:
    """Products of a token with the weights of a module and those within it."""
    modules = module.modules()
    experts = max(map(experts_per_token, modules), default=0)
    products = 0
    for x in modules:
        weight = x.get("weight")
        if weight is None or weight.ndim < 2:
            continue
        size = weight.size * 32 // x.bits if "scales" in x else weight.size
        products += size // weight.shape[0] * experts if hasattr(x, "num_experts") else size
    return products
