"""Chunks are evaluated some layers at a time where someone looks on: the same numbers, with a pause for Ctrl-C."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from tiny_models import make_llama

from mlx_snapkv import generate_step
from mlx_snapkv.engine import loop_model

POLICY = "snapkv:budget=60,n_window=16,lookahead=4"


def answered(model, tokens, **options):
    cache = make_prompt_cache(model)
    steps = generate_step(tokens, model, max_tokens=8, prompt_cache=cache, **options)
    logprobs = [one for _, one in steps]
    return mx.stack(logprobs), [c.keys for c in cache]


@pytest.mark.parametrize("policy", [None, POLICY, "keydiff:budget=60,block=64"])
def test_what_is_computed_is_the_same_with_progress(tokens, policy):
    model, told = make_llama(num_hidden_layers=5), []
    plain = answered(model, tokens, policy=policy)
    paced = answered(
        model, tokens, policy=policy, prompt_progress_callback=lambda *at: told.append(at)
    )
    assert mx.array_equal(plain[0], paced[0]) and told[-1] == (200, 200)
    assert all(mx.array_equal(a, b) for a, b in zip(plain[1], paced[1]))


def test_a_chunk_that_takes_long_tells_how_far_it_is(tokens, monkeypatch):
    monkeypatch.setattr(loop_model, "TELL_EVERY", 0)
    monkeypatch.setattr(loop_model, "FAST", 0)
    told = []
    model = make_llama(num_hidden_layers=4)
    answered(model, tokens, prompt_progress_callback=lambda done, total: told.append(done))
    assert told == [0, 49, 99, 149, 199, 200]  # 199 are the first chunk
