"""Compressed entries with fewer bits, and what is refused of them."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from request_helpers import in_order, is_quantised
from tiny_models import make_llama

from mlx_snapkv import SnapKVCache, SnapKVError, generate, generate_step
from mlx_snapkv.demo.questions import is_right
from mlx_snapkv.entries.quantization import BITS, Quantization

POLICY = "snapkv:budget=128,n_window=32,lookahead=4"


def rows(n, seed):
    return mx.random.normal((1, 2, n, 64), key=mx.random.key(seed))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("updates", [[1] * 11, [1, 1, 6, 1, 2, 1, 1], [9, 9]])
def test_a_window_holds_the_entries_of_the_plain_one(bits, updates):
    positions = mx.broadcast_to(mx.arange(6, dtype=mx.uint32), (1, 2, 6))
    held, how, options = (rows(10, 0), rows(10, 1)), Quantization(bits, 32), {"n_window": 4}
    plain = SnapKVCache(*held, positions, offset=20, **options)
    packed = SnapKVCache(*map(how.pack, held), positions, offset=20, quantization=how, **options)
    for n, L in enumerate(updates):
        assert str(plain.make_mask(L)) == str(packed.make_mask(L))
        for cache in (plain, packed):
            cache.update_and_fetch(rows(L, 10 + n), rows(L, 50 + n))
        assert mx.array_equal(plain.positions, packed.positions)
        for mine, theirs in zip(in_order(packed)[:2], in_order(plain)[:2]):
            assert all(map(mx.array_equal, mine, how.pack(theirs)))


@pytest.mark.parametrize("bits, share", [(8, 0.32), (4, 0.2)])
def test_a_request_keeps_quantised_entries_and_its_answer(demo_model, ask, bits, share):
    model, tokenizer = demo_model
    prompt, fact = ask(tokenizer, 900, seed=4)
    cache, reports = make_prompt_cache(model), []
    options = {"policy": POLICY, "kv_bits": bits, "kv_group_size": 32, "max_tokens": 12}
    text = generate(
        model, tokenizer, prompt, prompt_cache=cache, on_report=reports.append, **options
    )
    assert is_right(fact, text)
    quantized = [c for c in cache if is_quantised(c)]
    assert quantized and all(c.bits == bits for c in quantized)
    assert all(c.size() - 128 == c.offset - len(prompt) > 4 for c in quantized)
    n_rows = 128 + 16  # with room for more
    full = reports[0].kv_bytes_before * n_rows / (len(prompt) + 4)
    assert reports[0].kv_bytes_after == sum(c.nbytes for c in quantized) < share * full


@pytest.mark.parametrize(
    "options, words",
    [
        ({"kv_bits": 5}, "kv_bits must be 2, 3, 4, 6, 8, got 5"),
        ({"kv_bits": 8, "kv_group_size": 128}, r"must be one of \[32, 64\] for heads of size"),
    ],
)
def test_what_cannot_be_is_refused_before_the_prompt_is_read(demo_llama, options, words):
    cache = make_prompt_cache(demo_llama[0])
    options |= {"policy": POLICY, "prompt_cache": cache}
    with pytest.raises(SnapKVError, match=words):
        generate_step(mx.zeros((300,), mx.int32), demo_llama[0], **options)
    assert all(c.empty() for c in cache)


def test_small_heads_have_no_group_that_fits(tokens):
    words = r"kv_bits needs heads of a size that 32 divides, .* \[8\]"
    with pytest.raises(SnapKVError, match=words):
        generate_step(tokens, make_llama(), policy=POLICY.replace("128", "64"), kv_bits=8)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_scales_biases_and_unpacked_entries_keep_the_dtype(dtype, bits):
    how, plain = Quantization(bits, 32), rows(5, 0).astype(dtype)
    packed, scales, biases = how.pack(plain)
    assert (packed.dtype, scales.dtype, biases.dtype) == (mx.uint32, dtype, dtype)
    unpacked = how.unpack((packed, scales, biases))
    assert unpacked.dtype == dtype and unpacked.shape == plain.shape
    # A step of the coarsest group, and what half precision rounds away.
    off = mx.abs(unpacked.astype(mx.float32) - plain.astype(mx.float32)).max()
    assert off < 5 / (2**bits - 1) + 0.04
