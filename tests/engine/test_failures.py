"""After any failure, classes are restored, and the caller's cache is either unchanged or fully compressed."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from request_helpers import SMALL, fail_in, steps
from tiny_models import make_llama

from mlx_snapkv import (
    SnapKVCache,
    SnapKVError,
    batch_generate,
    generate_step,
    prefill,
    stream_generate,
)


@pytest.mark.parametrize("call, lookahead", [(1, 4), (2, 4), (3, 0), (3, 4), (5, 4)])
def test_an_exception_leaves_the_callers_cache_as_it_was_or_compressed(
    tiny_model, tokens, call, lookahead, monkeypatch
):
    fail_in(call, tiny_model, monkeypatch)
    cache = make_prompt_cache(tiny_model)
    before, options = list(cache), {"prompt_cache": cache, "prefill_step_size": 100}
    with pytest.raises(RuntimeError, match="the model failed"):
        steps(tiny_model, tokens, snapkv=SMALL | {"lookahead": lookahead}, **options)
    if isinstance(cache[-1], SnapKVCache):
        assert not any(type(c).__name__ in ("KVCache", "RecordingKVCache") for c in cache)
    else:
        assert all(a is b for a, b in zip(cache, before)) and all(c.empty() for c in cache)


@pytest.mark.parametrize("top_k", [0, 20])
def test_nan_attention_is_one_sentence_and_leaves_the_cache_alone(tokens, top_k):
    model = make_llama()
    model.model.layers[1].self_attn.q_proj.weight[0, 0] = float("nan")
    cache = make_prompt_cache(model)
    with pytest.raises(SnapKVError, match="NaN"):
        steps(model, tokens, snapkv=SMALL | {"top_k": top_k}, prompt_cache=cache)
    assert all(c.empty() for c in cache)


def test_one_cache_list_serves_one_request(tokens):
    """Entries that another caller adds after the call are kept."""
    model = make_llama()
    shared = make_prompt_cache(model)
    first, second = (
        generate_step(tokens, model, snapkv=SMALL, prompt_cache=shared) for _ in range(2)
    )
    next(first), next(second)
    list(zip(range(8), first))
    with pytest.raises(SnapKVError, match="another request has filled this prompt cache"):
        list(zip(range(8), second))
    late = make_prompt_cache(model)
    waiting = generate_step(tokens, model, snapkv=SMALL, prompt_cache=late)
    model(tokens[None, :50], cache=late)
    with pytest.raises(SnapKVError, match="another request"):
        next(waiting)
    assert late[0].offset == 50


@pytest.mark.parametrize(
    "keywords, message",
    [
        ({"kv_bits": 8}, "kv_bits"),
        ({"max_kv_size": 64}, "max_kv_size"),
        ({"prompt": mx.array([], mx.int32)}, "the prompt is empty"),
        ({"stream": 5}, "third argument is mlx-lm's stream: give max_tokens=5"),
    ],
)
def test_requests_that_cannot_be_served_fail_at_the_call(tokens, keywords, message):
    options = {"prompt": tokens, "model": make_llama(), "snapkv": SMALL} | keywords
    with pytest.raises(SnapKVError, match=message):
        generate_step(**options)


STEP = "prefill_step_size must be a whole number of at least 1, got "
PROMPTS = [([], "is empty"), ([[1, 2]], "got shape"), ([0.5], "whole numbers"), ("x", "got a text")]


@pytest.mark.parametrize("method", [{}, {"snapkv": SMALL}, {"sparse": True}])
def test_every_entrance_refuses_impossible_prompts_and_chunks(demo_llama, method):
    model, tokenizer = demo_llama
    ways = [
        lambda prompt, **how: generate_step(prompt, model, **method, **how),
        lambda prompt, **how: batch_generate(model, tokenizer, [prompt], **method, **how),
        lambda prompt, **how: stream_generate(model, tokenizer, prompt, **method, **how),
        lambda prompt, **how: prefill(model, prompt, "snapkv:top_k=8", **how),
    ]
    for way in ways:
        for size in (0, -1, 2.5):
            with pytest.raises(SnapKVError, match=f"{STEP}{size}"):
                way([1, 2, 3], prefill_step_size=size)
        for prompt, words in PROMPTS:
            if not (prompt == "x" and way is ways[2]):  # stream_generate takes texts
                with pytest.raises(SnapKVError, match=words):
                    way(prompt)
