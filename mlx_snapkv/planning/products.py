"""Counting the entries that a token can attend to for a share of the model's other multiplications."""

from typing import Any

import mlx.nn as nn

from ..caches.layers import AttentionLayer
from ..models.counts import experts_per_token, hidden_size


def entries_for(share: float, model: Any, layers: list[AttentionLayer]) -> int:
    """Return how many entries each of `layers` can read for every token at a `share` of the products with weights.

    The number is large where attention is a small part of the work: in large models, mixtures of experts and hybrids.
    The products of an entry are estimated from the weights of its attention module, which is slightly too much, since
    keys and values are computed once. The output layer is not counted: a prompt's tokens don't go through it.
    """
    all_products = sum(_products(layer) for layer in model.layers)
    attention_products = sum(_products(reader) for layer in layers for reader in layer.readers)
    # An entry's products are about those of its attention module, divided by the hidden size.
    return int(share * hidden_size(model) * all_products / attention_products)


def _products(module: nn.Module) -> int:
    """Return the products of a token with the weights of a module and of the modules in it."""
    modules = module.modules()
    experts = max(map(experts_per_token, modules), default=0)
    products = 0
    for x in modules:
        weight = x.get("weight")
        if weight is None or weight.ndim < 2:
            continue
        # A quantised weight is an array of 32-bit integers with several values each.
        n_weights = weight.size * 32 // x.bits if "scales" in x else weight.size
        if hasattr(x, "num_experts"):  # its first axis; a token goes through some of them
            n_weights = n_weights // weight.shape[0] * experts
        products += n_weights
    return products
