"""A model's dtype is its caches' dtype, whatever the policy and however few the bits."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from tiny_models import make_llama, make_qwen

from mlx_snapkv import generate_step

KEYDIFF = "keydiff:budget=40,block=16"
SNAPKV = "snapkv:budget=40,n_sink=2,n_window=16,obs_window=8,lookahead=4"
POLICIES = [
    SNAPKV,
    f"{KEYDIFF},schedule=once",
    KEYDIFF,
    "kvzip:budget=40",
    f"{KEYDIFF} then snapkv:budget=24,n_sink=2,n_window=8,obs_window=8,lookahead=4",
]


def make_hybrid(**changes):
    """A Qwen3-Next without experts: MLX computes those in float32 only on a CPU."""
    return make_qwen(num_experts=0, **changes)


def arrays(stored):
    return [stored] if isinstance(stored, mx.array) else list(stored)


def check(model, dtype, tokens, policy, **bits):
    """A request, whose compressed caches are told."""
    model.set_dtype(dtype)
    cache = make_prompt_cache(model)
    plain = [type(c) for c in cache]
    reports = []
    options = {"policy": policy, "prompt_cache": cache, "max_tokens": 24, **bits}
    answer = list(generate_step(tokens, model, **options, on_report=reports.append))
    told = "8 bits" if bits else str(dtype).removeprefix("mlx.core.")
    assert len(answer) == 24 and reports[0].kv_dtype == told and f"({told}" in str(reports[0])
    assert all(mx.isfinite(logprobs).all() for _, logprobs in answer)
    compressed = [c for c, was in zip(cache, plain, strict=True) if type(c) is not was]
    assert compressed and all(c.size() < tokens.size for c in compressed)
    return compressed


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("make", [make_llama, make_hybrid])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_rows_have_the_models_dtype(make, tokens, dtype, policy):
    for cache in check(make(), dtype, tokens, policy):
        assert (cache.keys.dtype, cache.values.dtype) == (dtype, dtype)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("make", [make_llama, make_hybrid])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_quantised_rows_have_scales_of_the_models_dtype(make, tokens, dtype, policy):
    model = make(head_dim=32)
    for cache in check(model, dtype, tokens, policy, kv_bits=8, kv_group_size=32):
        for packed, scales, biases in (arrays(cache.keys), arrays(cache.values)):
            assert (packed.dtype, scales.dtype, biases.dtype) == (mx.uint32, dtype, dtype)
