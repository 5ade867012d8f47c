"""Quantised entries in every kind of cache, and caches in the model's dtype."""

import functools
import sys

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from request_helpers import is_quantised, steps
from saved_helpers import KEYDIFF, SNAPKV, SPECS
from tiny_models import make_llama, make_qwen

from mlx_snapkv import BlockKVCache
from mlx_snapkv.entries.quantization import Quantised, pack, unpack

pytestmark = pytest.mark.usefixtures("short_blocks")

# On a CPU, MLX computes experts in float32 only.
HYBRID = functools.partial(make_qwen, num_experts=0)
CASES = [*SPECS[::3], f"{SNAPKV},on_full=slide", f"{SNAPKV},on_full=grow"]


def answered(model, tokens, policy, bits, n=40):
    """Return the caches after an answer of fixed tokens, each token's log-probabilities, and the report."""
    cache, reports, answer = make_prompt_cache(model), [], iter(range(n + 1))
    options = {"kv_bits": bits, "kv_group_size": 32, "on_report": reports.append}
    options["sampler"] = lambda logprobs: mx.array([next(answer) % 64])
    items = steps(model, tokens, n, policy=policy, prompt_cache=cache, **options)
    return cache, mx.stack([logprobs for _, logprobs in items]), reports[0]


@pytest.mark.parametrize("policy, bits", [(p, (8, 4)[i % 2]) for i, p in enumerate(CASES)])
def test_quantised_attention_is_near_plain_attention_on_rounded_entries(
    tokens, policy, bits, monkeypatch
):
    """mlx-lm's quantised attention reads packed entries, and its plain attention reads the same entries unpacked."""
    model = make_llama(head_dim=32)
    cache, near, report = answered(model, tokens, policy, bits)
    plain, _, unquantised = answered(model, tokens, policy, None)
    assert report.entries_kept == unquantised.entries_kept
    for mine, theirs in zip(cache, plain, strict=True):
        assert is_quantised(mine) and (mine.bits, mine.group_size) == (bits, 32)
        assert mine.offset == theirs.offset and mine.size() == theirs.size()
        if isinstance(mine, BlockKVCache):
            assert mine.size() <= mine.capacity == mine.quota.entries + mine.block
        assert mine.nbytes < theirs.nbytes
    assert report.kv_bytes_after < unquantised.kv_bytes_after
    assert report.kv_bytes_before == unquantised.kv_bytes_before
    instead = {pack: lambda rows, how: unpack(pack(rows, how), how), unpack: lambda x, how: x}
    for module in [x for x in sys.modules.values() if x.__name__.startswith("mlx_snapkv.")]:
        for name, value in vars(module).copy().items():
            if value in (pack, unpack):
                monkeypatch.setattr(module, name, instead[value])
    monkeypatch.delattr(Quantised, "bits")  # mlx-lm checks for it to choose its quantised attention
    rounded, exact, _ = answered(model, tokens, policy, bits)
    for one, other in zip(cache, rounded, strict=True):
        assert mx.array_equal(one.positions, other.positions)
    # The two attentions sum in different orders, so a value between two steps may be rounded either way.
    assert mx.abs(near - exact).max() < 0.01


@pytest.mark.parametrize("policy", [SNAPKV, KEYDIFF])
@pytest.mark.parametrize("make, bits", [(make_llama, None), (HYBRID, None), (make_llama, 8)])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_entries_and_scales_have_the_models_dtype(make, tokens, dtype, policy, bits):
    model = make(head_dim=32)
    model.set_dtype(dtype)
    fresh = [type(c) for c in make_prompt_cache(model)]
    caches, logprobs, report = answered(model, tokens, policy, bits, 24)
    name = "8 bits" if bits else str(dtype).removeprefix("mlx.core.")
    assert report.kv_dtype == name and f"({name}" in str(report)
    assert mx.isfinite(logprobs).all()
    compressed = [c for c, was in zip(caches, fresh, strict=True) if type(c) is not was]
    assert compressed and all(c.size() < tokens.size for c in compressed)
    for stored in (x for c in compressed for x in (c.keys, c.values)):
        dtypes = [stored.dtype] if bits is None else [x.dtype for x in stored]
        assert dtypes == ([dtype] if bits is None else [mx.uint32, dtype, dtype])
