"""Half-precision models, using a GPU's code paths: no NaN, and answers as close to the full cache's as in float32.

The cases vary weights, entries, dtype, method, model and key magnitude. They cover most pairs of values.
"""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import reference
from mlx.utils import tree_map_with_path
from model_configs import CONFIGS, make_model
from request_helpers import forced, plain, steps

F16, B16 = mx.float16, mx.bfloat16
TOKENS = mx.array(np.random.default_rng(0).integers(1, 128, 900))
ANSWER = [5, 17, 99, 3]
METHODS = {
    "snapkv": {"policy": "snapkv:top_k=40,n_window=24"},
    "keydiff": {"policy": "keydiff:budget=64,block=32"},
    "sparse": {"sparse": "top_k=48,read_top_k=64,when=always"},
}
SIZES = {"head_dim": 32, "sliding_window": 64, "num_experts": 0, "attention_bias": True}
# Queries and keys that are normed are made large by the weights of the norms.
BIAS = {"k_proj.bias": 2000, "q_proj.bias": 100}
LARGER = "q_proj.weight", "k_proj.weight", "q_norm.weight", "k_norm.weight"


def model_of(name, larger, weights):
    """Return a random model with queries and keys `larger` times as large, or with a "bias" for logits of 100,000."""
    model, by = make_model(name, CONFIGS[name] | SIZES), BIAS
    if larger != "bias":
        by = dict.fromkeys(LARGER, larger)

    def changed(path, x):
        return x * by.get(".".join(path.split(".")[-2:]), 1)

    model.update(tree_map_with_path(changed, model.parameters()))
    if weights:
        nn.quantize(model, group_size=32, bits=weights)
    return model


def divergence(model, how, n):
    """Return the mean KL divergence from the model's own full-cache predictions, after `n` tokens."""
    full = plain(model, TOKENS[:n], len(ANSWER), sampler=forced(ANSWER))
    ours = steps(model, TOKENS[:n], len(ANSWER), sampler=forced(ANSWER), **how)
    wanted, found = (
        np.log(reference.softmax(np.stack([x.astype(mx.float32) for _, x in logs])[1:]))
        for logs in (full, ours)
    )
    assert np.isfinite(found).all()
    return (np.exp(wanted) * (wanted - found)).sum(axis=-1).mean()


@pytest.mark.parametrize("name, larger, weights, entries, dtype, method, n", [
    ("llama", "bias", None, None, B16, "snapkv", 300), ("llama", "bias", None, 8, B16, "keydiff", 300),
    ("llama", 120, None, None, F16, "snapkv", 300), ("llama", 120, None, None, F16, "sparse", 900),
    ("llama", 1, 4, 4, F16, "snapkv", 100), ("llama", 30, 8, 8, B16, "sparse", 100),
    ("qwen3_next", 30, None, None, B16, "snapkv", 300), ("qwen3_next", 5, None, 8, F16, "sparse", 300),
    ("qwen3_next", 30, 8, 8, F16, "keydiff", 100), ("qwen3_next", 1, 4, None, B16, "keydiff", 100),
    ("gemma3_text", 30, None, None, F16, "sparse", 300), ("gemma3_text", 30, 8, 8, F16, "snapkv", 100),
    ("gemma3_text", 5, 4, None, B16, "keydiff", 100), ("gemma3_text", 1, None, 8, B16, "sparse", 300),
])  # fmt: skip
def test_half_precision_is_as_near_to_the_full_cache_as_float32(
    name, larger, weights, entries, dtype, method, n
):
    """In prompts of 900 tokens, some of the chunks choose what they read as well."""
    model, how = model_of(name, larger, weights), dict(METHODS[method])
    if method == "sparse":
        how["sparse"] += "" if entries is None else f",store={entries}bit"
    elif entries is not None:
        how |= {"kv_bits": entries, "kv_group_size": 32}
    wanted = divergence(model, how, n)
    model.set_dtype(dtype)
    assert divergence(model, how, n) < 1.5 * wanted + 0.02
