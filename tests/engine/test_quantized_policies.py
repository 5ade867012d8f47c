"""Quantised entries with every policy, and a model's dtype, which is its caches'."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from request_helpers import assert_unpatched, is_quantised, steps
from saved_helpers import SNAPKV, SPECS
from tiny_models import make_llama, make_qwen

from mlx_snapkv import BlockKVCache, generate_step
from mlx_snapkv.entries.quantization import Quantised, Quantization

BITS = [8, 4]
CASES = [*SPECS[::3], f"{SNAPKV},on_full=slide", f"{SNAPKV},on_full=keydiff"]


@pytest.fixture(scope="module")
def model():
    return make_llama(head_dim=32)


def said(model, tokens, policy, bits, n=40):
    """The caches after an answer of fixed tokens, the log-probabilities of each, and the report."""
    cache, reports, answer = make_prompt_cache(model), [], iter(range(n + 1))
    items = steps(
        model,
        tokens,
        n,
        policy=policy,
        prompt_cache=cache,
        on_report=reports.append,
        sampler=lambda logprobs: mx.array([next(answer) % 64]),
        **({} if bits is None else {"kv_bits": bits, "kv_group_size": 32}),
    )
    assert_unpatched()
    return cache, mx.stack([logprobs for _, logprobs in items]), reports[0]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("policy", CASES)
def test_every_cache_is_quantised_and_within_its_bound(model, tokens, policy, bits):
    cache, _, report = said(model, tokens, policy, bits)
    plain, _, unquantised = said(model, tokens, policy, None)
    assert report.entries_kept == unquantised.entries_kept
    for mine, theirs in zip(cache, plain, strict=True):
        assert is_quantised(mine) and (mine.bits, mine.group_size) == (bits, 32)
        assert mine.offset == theirs.offset and mine.size() == theirs.size()
        if isinstance(mine, BlockKVCache) and "on_full=grow" not in policy:
            assert mine.size() <= mine.capacity == mine.quota.entries + mine.block
        assert mine.nbytes < theirs.nbytes
    assert report.kv_bytes_after < unquantised.kv_bytes_after
    assert report.kv_bytes_before == unquantised.kv_bytes_before


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("policy", CASES)
def test_it_is_the_plain_run_with_rounded_rows(model, tokens, policy, bits, monkeypatch):
    """mlx-lm's quantised attention on packed rows against its plain attention on the same rows, unpacked."""
    cache, near, _ = said(model, tokens, policy, bits)
    pack, unpack = Quantization.pack, Quantization.unpack
    monkeypatch.setattr(Quantization, "pack", lambda self, rows: unpack(self, pack(self, rows)))
    monkeypatch.setattr(Quantization, "unpack", lambda self, rows: rows)
    monkeypatch.delattr(Quantised, "bits")  # which mlx-lm's attention asks for
    rounded, exact, _ = said(model, tokens, policy, bits)
    for one, other in zip(cache, rounded, strict=True):
        assert mx.array_equal(one.positions, other.positions)
    # A value near the middle of two steps may be rounded either way by the two orders of summing up.
    assert mx.abs(near - exact).max() < 0.01


SMALL_KEYDIFF = "keydiff:budget=40,block=16"
SMALL_SNAPKV = "snapkv:budget=40,n_sink=2,n_window=16,obs_window=8,lookahead=4"
TYPED = [SMALL_SNAPKV, SMALL_KEYDIFF, "kvzip:budget=40"]


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


@pytest.mark.parametrize("policy", TYPED)
@pytest.mark.parametrize("make", [make_llama, make_hybrid])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_rows_have_the_models_dtype(make, tokens, dtype, policy):
    for cache in check(make(), dtype, tokens, policy):
        assert (cache.keys.dtype, cache.values.dtype) == (dtype, dtype)


@pytest.mark.parametrize("policy", TYPED)
@pytest.mark.parametrize("make", [make_llama, make_hybrid])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_quantised_rows_have_scales_of_the_models_dtype(make, tokens, dtype, policy):
    model = make(head_dim=32)
    for cache in check(model, dtype, tokens, policy, kv_bits=8, kv_group_size=32):
        for packed, scales, biases in (arrays(cache.keys), arrays(cache.values)):
            assert (packed.dtype, scales.dtype, biases.dtype) == (mx.uint32, dtype, dtype)
