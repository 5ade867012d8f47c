"""A follow-up turn of 150 tokens against the same tokens one by one, on every cache that a policy leaves."""

import copy

import mlx.core as mx
import numpy as np
import pytest
from request_helpers import assert_unpatched, steps

from mlx_snapkv import SnapKV, patch_for_snapkv, prefill, unpatch_snapkv
from mlx_snapkv.caches.adapter import layer_cache
from mlx_snapkv.caches.layers import members
from mlx_snapkv.engine.loop_model import one_by_one
from mlx_snapkv.policies import H2O, KeyDiff

ROWS = {"budget": 24, "n_sink": 4, "n_window": 10, "block": 16}
VOTED = {"top_k": 20, "n_sink": 4, "obs_window": 8}
POLICIES = [
    *(SnapKV(**VOTED, n_window=64, on_full=way) for way in ("slide", "keydiff")),
    SnapKV(**VOTED, n_window=400),
    SnapKV(budget=24, block=16, schedule="block"),
    *(kind(**ROWS) for kind in (KeyDiff, H2O)),
    KeyDiff(**ROWS | {"budget": "pyramid:40"}),
]
TURN = mx.array(np.random.default_rng(1).integers(1, 64, 150))


def same_rows(caches, others):
    for a, b in zip(members(caches), members(others)):
        if hasattr(a, "positions"):
            ours, theirs = layer_cache(a).held(), layer_cache(b).held()
            assert a.offset == b.offset and mx.array_equal(ours.positions, theirs.positions)
            assert mx.allclose(ours.keys, theirs.keys, atol=1e-5)


def fed_alone(model, cache):
    """Logits `(150, vocab_size)`."""
    return mx.concatenate([model(t[None, None], cache=cache)[0] for t in TURN])


@pytest.fixture(scope="module")
def told_alone():
    """told_alone(model, tokens, policy): the caches and logits of a prompt and the turn fed alone, made once."""
    made = {}

    def get(model, tokens, policy):
        key = type(model), str(policy)
        if key not in made:
            cache, _ = prefill(model, tokens, policy)
            patch_for_snapkv(model)
            made[key] = cache, fed_alone(model, cache)
            unpatch_snapkv(model)
        cache, logits = made[key]
        return copy.deepcopy(cache), logits

    return get


@pytest.fixture
def unpatched_after(tiny_model):
    yield
    unpatch_snapkv(tiny_model)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("before", [0, 5])
def test_a_turn_at_once_is_as_one_by_one(
    tiny_model, tokens, told_alone, unpatched_after, policy, before
):
    """Whether the caches have just chosen or chose some tokens ago."""
    caches = [prefill(tiny_model, tokens, policy)[0] for _ in range(2 if before else 1)]
    if not before:
        alone, expected = told_alone(tiny_model, tokens, policy)
        caches.insert(0, alone)
    patch_for_snapkv(tiny_model)
    for token in tokens[:before]:
        for cache in caches:
            tiny_model(token[None, None], cache=cache)
    if before:
        expected = fed_alone(tiny_model, caches[0])
    at_once = one_by_one(tiny_model, caches[1])(TURN[None], cache=caches[1])[0]
    assert mx.abs(at_once - expected).max() < 1e-4
    for cache in caches:  # until then a window holds all tokens of the last call
        tiny_model(TURN[None, :1], cache=cache)
    same_rows(*caches)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_generate_step_reads_a_follow_up_so(tiny_model, tokens, told_alone, policy):
    alone, logits = told_alone(tiny_model, tokens, policy)
    caches = [alone, prefill(tiny_model, tokens, policy)[0]]
    logits = logits[-1]
    patch_for_snapkv(tiny_model)
    token = mx.argmax(logits).item()
    tiny_model(mx.array([[token]]), cache=caches[0])  # mlx-lm's loop runs one token ahead
    unpatch_snapkv(tiny_model)
    [(said, logprobs)] = steps(tiny_model, TURN, 1, prompt_cache=caches[1])
    assert said == token and mx.abs(logprobs - (logits - mx.logsumexp(logits))).max() < 1e-4
    same_rows(*caches)
    assert_unpatched()
