"""Compressed rows with fewer bits."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from request_helpers import in_order, is_quantised
from tiny_models import make_llama

from mlx_snapkv import (
    Conversation,
    SnapKVCache,
    SnapKVError,
    generate,
    generate_step,
    saved,
)
from mlx_snapkv.demo.questions import is_right
from mlx_snapkv.entries.quantization import Quantization

POLICY = "snapkv:budget=128,n_window=32,lookahead=4"
D = 64


def rows(n, seed):
    return mx.random.normal((1, 2, n, D), key=mx.random.key(seed))


@pytest.fixture(params=[4, 8])
def pair(request):
    """The same compressed cache, plain and quantised."""
    positions = mx.broadcast_to(mx.arange(6, dtype=mx.uint32), (1, 2, 6))
    held = rows(10, 0), rows(10, 1)
    how = Quantization(request.param, 32)
    options = {"offset": 20, "n_window": 4}
    return (
        SnapKVCache(*held, positions, **options),
        SnapKVCache(*map(how.pack, held), positions, quantization=how, **options),
    )


def assert_same_rows(plain, quantized):
    assert mx.array_equal(plain.positions, quantized.positions)
    for mine, theirs in zip(in_order(quantized)[:2], in_order(plain)[:2]):
        parts = mx.quantize(theirs, group_size=32, bits=quantized.bits)
        assert all(map(mx.array_equal, mine, parts))


@pytest.mark.parametrize("updates", [[1] * 11, [3], [1, 1, 6, 1, 2, 1, 1], [9, 9]])
def test_it_holds_the_rows_of_the_plain_one(pair, updates):
    plain, quantized = pair
    for n, L in enumerate(updates):
        assert str(plain.make_mask(L)) == str(quantized.make_mask(L))
        for cache in pair:
            cache.update_and_fetch(rows(L, 10 + n), rows(L, 50 + n))
        assert plain.size() == quantized.size() and plain.offset == quantized.offset
        assert_same_rows(plain, quantized)


def test_tokens_can_be_taken_back(pair):
    for cache in pair:
        cache.update_and_fetch(rows(3, 2), rows(3, 3))
        cache.trim(2)
    assert_same_rows(*pair)


def test_one_token_keeps_every_shape(pair):
    _, quantized = pair
    shapes = [part.shape for part in (*quantized.keys, *quantized.values)]
    for n in range(9):
        quantized.update_and_fetch(rows(1, n), rows(1, n))
    assert [part.shape for part in (*quantized.keys, *quantized.values)] == shapes


@pytest.mark.parametrize("bits, share", [(8, 0.32), (4, 0.2)])
def test_a_request_keeps_quantised_rows_and_its_answer(demo_model, ask, bits, share):
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


def test_saved_and_loaded_it_goes_on_the_same(demo_llama, ask, tmp_path):
    model, tokenizer = demo_llama
    prompt, _ = ask(tokenizer, 500, seed=4)
    cache = make_prompt_cache(model)
    options = {"policy": POLICY, "kv_bits": 8, "kv_group_size": 32, "max_tokens": 8}
    said = [t for t, _ in generate_step(mx.array(prompt), model, prompt_cache=cache, **options)]
    saved.save(tmp_path / "q.safetensors", model, cache, prompt + said)
    loaded = saved.load(tmp_path / "q.safetensors", model).prompt_cache
    for c in (cache, loaded):
        assert any(is_quantised(x) for x in c)
    a, b = (
        [t for t, _ in generate_step(mx.array([5]), model, prompt_cache=c, max_tokens=40)]
        for c in (cache, loaded)
    )
    assert a == b


@pytest.mark.parametrize(
    "options, words",
    [
        ({"kv_bits": 5}, "kv_bits must be 2, 3, 4, 6, 8, got 5"),
        ({"kv_bits": 8, "kv_group_size": 128}, r"must be one of \[32, 64\] for heads of size"),
    ],
)
def test_what_cannot_be_is_refused_before_the_prompt_is_read(demo_llama, options, words):
    model, _ = demo_llama
    cache = make_prompt_cache(model)
    with pytest.raises(SnapKVError, match=words):
        generate_step(
            mx.zeros((300,), mx.int32), model, **{"policy": POLICY, "prompt_cache": cache} | options
        )
    assert all(c.empty() for c in cache)


def test_small_heads_have_no_group_that_fits(tokens):
    with pytest.raises(
        SnapKVError, match=r"kv_bits needs heads of a size that 32 divides, .* \[8\]"
    ):
        generate_step(tokens, make_llama(), policy=POLICY.replace("128", "64"), kv_bits=8)


def test_a_conversation_says_at_once_what_cannot_be(demo_llama):
    for options, words in (
        ({"kv_bits": 5}, "got 5"),
        ({"kv_bits": 8, "kv_group_size": 128}, "128"),
    ):
        with pytest.raises(SnapKVError, match=words):
            Conversation(*demo_llama, policy=POLICY, **options)
