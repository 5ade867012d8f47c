"""Models as mlx-lm's loops call them: turns equal single tokens, and long chunks report progress."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from request_helpers import steps
from tiny_models import make_llama, make_qwen

from mlx_snapkv import SnapKV, prefill
from mlx_snapkv.caches.adapter import layer_cache
from mlx_snapkv.caches.layers import all_caches
from mlx_snapkv.compress.policies import H2O, KeyDiff
from mlx_snapkv.engine import loop_model
from mlx_snapkv.models import attention_classes
from mlx_snapkv.models.patch import recording

ROWS = {"budget": 24, "n_sink": 4, "n_window": 10, "block": 16}
VOTED = {"top_k": 20, "n_sink": 4, "obs_window": 8}
POLICIES = [
    SnapKV(**VOTED, n_window=24, on_full="slide"),
    SnapKV(**VOTED, n_window=24),
    H2O(**ROWS),
    KeyDiff(**ROWS),
]
TURN = mx.array(np.random.default_rng(1).integers(1, 64, 48))


@pytest.mark.parametrize("before", [0, 5])
@pytest.mark.parametrize(
    "make, policy",
    [
        *((make_llama, policy) for policy in POLICIES),
        (make_qwen, POLICIES[0]),
        (make_qwen, H2O(**ROWS)),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_generate_step_reads_a_turn_as_token_by_token(make, tokens, policy, before):
    """The caches have evicted either just before or some tokens ago. Linear layers read every token once."""
    tiny_model = make()
    caches = [prefill(tiny_model, tokens, policy)[0] for _ in range(2)]
    with recording(attention_classes(tiny_model)):
        for cache in caches:
            for token in tokens[:before]:
                tiny_model(token[None, None], cache=cache)
        for token in TURN:
            logits = tiny_model(token[None, None], cache=caches[0])[0, -1]
        token = mx.argmax(logits).item()
        tiny_model(mx.array([[token]]), cache=caches[0])  # mlx-lm's loop runs one token ahead
    [(said, logprobs)] = steps(tiny_model, TURN, 1, prompt_cache=caches[1])
    assert said == token and mx.abs(logprobs - (logits - mx.logsumexp(logits))).max() < 1e-4
    for a, b in zip(*map(all_caches, caches)):
        if hasattr(a, "positions"):
            ours, theirs = layer_cache(a).held(), layer_cache(b).held()
            assert a.offset == b.offset and mx.array_equal(ours.positions, theirs.positions)
            assert mx.allclose(ours.keys, theirs.keys, atol=1e-5)


# Chunks with a progress callback are evaluated some layers at a time.

SNAPKV = "snapkv:budget=60,n_window=16,lookahead=4"


def answered(model, tokens, **options):
    cache = make_prompt_cache(model)
    found = steps(model, tokens, 8, prompt_cache=cache, **options)
    return [mx.stack([logprobs for _, logprobs in found]), *(c.keys for c in cache)]


@pytest.mark.parametrize("policy", [None, SNAPKV, "keydiff:budget=60,block=64"])
def test_progress_callbacks_do_not_change_results(tokens, policy):
    model, told = make_llama(num_hidden_layers=5), []
    plain = answered(model, tokens, policy=policy)
    progress = {"prompt_progress_callback": lambda *at: told.append(at)}
    paced = answered(model, tokens, policy=policy, **progress)
    assert all(mx.array_equal(a, b) for a, b in zip(plain, paced)) and told[-1] == (200, 200)


def test_a_slow_chunk_reports_its_progress(tokens, monkeypatch):
    monkeypatch.setattr(loop_model, "PROGRESS_INTERVAL", 0)
    monkeypatch.setattr(loop_model, "MIN_SECONDS", 0)
    told = []
    model = make_llama(num_hidden_layers=4)
    answered(model, tokens, prompt_progress_callback=lambda done, total: told.append(done))
    assert told == [0, 49, 99, 149, 199, 200]  # the first chunk has 199 tokens
