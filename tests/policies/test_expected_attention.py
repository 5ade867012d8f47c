"""Expected Attention against float64 NumPy made of a model's weights, and through whole requests."""

import mlx.core as mx
import numpy as np
import pytest
import reference
from mlx_lm.models.cache import make_prompt_cache
from tiny_models import make_llama

from mlx_snapkv import ExpectedAttention, SnapKVError
from mlx_snapkv.caches.layers import attention_layers
from mlx_snapkv.caches.recording import RecordingKVCache
from mlx_snapkv.engine.request import Request
from mlx_snapkv.entries.entries import Entries
from mlx_snapkv.models.patch import recording
from mlx_snapkv.policies import expected_attention

T, D, H, GROUP = 70, 8, 2, 2


def read(model, tokens, n_sink):
    """The first layer's entries and its input, `(T, hidden)`, after chunks of 33 and 37 tokens."""
    inputs = []
    caches = [RecordingKVCache(T, T, T) for _ in model.layers]
    for layer, cache in zip(attention_layers(model, caches), caches):
        cache.layer, cache.statistics_from = layer, n_sink
    first = model.layers[0].self_attn
    project = first.q_proj

    def noted(x):
        inputs.append(x)
        return project(x)

    first.q_proj = noted
    with recording([type(first)]):
        for part in (tokens[:33], tokens[33:T]):
            model(part[None], cache=caches)
    first.q_proj = project
    cache = caches[0]
    entries = Entries(
        *cache.keys_and_values(), layer=cache.layer, statistics=cache.statistics, budget=20
    )
    return entries, np.concatenate([np.asarray(x[0], np.float64) for x in inputs])


def rotation(position):
    """LLaMA's: dimension i turns with i + D / 2."""
    angle = position * 10000.0 ** (-np.arange(0, D, 2) / D)
    cos, sin = np.diag(np.cos(angle)), np.diag(np.sin(angle))
    return np.block([[cos, -sin], [sin, cos]])


@pytest.mark.parametrize("n_sink", [0, 4, 9])
@pytest.mark.parametrize("n_bytes", [expected_attention.BLOCK_BYTES, 1])  # 1: blocks of 64 keys
def test_scores(n_sink, n_bytes, tokens, monkeypatch):
    monkeypatch.setattr(expected_attention, "BLOCK_BYTES", n_bytes)
    model = make_llama()
    attention = model.layers[0].self_attn
    attention.q_proj.weight = 4 * attention.q_proj.weight  # else all weights are about the same
    entries, x = read(model, tokens, n_sink)
    queries = (x @ np.asarray(attention.q_proj.weight, np.float64).T).reshape(T, H, GROUP, D)
    to_come = [rotation(p) for p in range(T, T + 512)]
    scores = np.asarray(ExpectedAttention(n_sink=n_sink).score(entries))
    for head in range(H):
        of_head = queries[:, head].transpose(1, 0, 2)
        states = entries.keys[0, head], entries.values[0, head]
        expected = reference.expected_attention(*states, of_head, to_come, n_sink, D**-0.5)
        assert np.allclose(scores[0, head, n_sink:], np.log(expected), atol=1e-4)
    assert scores[0, :, :n_sink].min(initial=np.inf) > scores[0, :, n_sink:].max()


def test_weights_too_small_for_float32_are_still_told_apart(tokens):
    model = make_llama()
    attention = model.layers[0].self_attn
    attention.q_proj.weight = 400 * attention.q_proj.weight
    entries, _ = read(model, tokens, 4)
    scores = ExpectedAttention().score(entries)
    assert len(set(scores[0, 0, 4:].tolist())) == T - 4 and scores.min().item() < -100


SIZE = {"budget": 40, "block": 16, "n_window": 8}


def test_a_later_turn_whose_first_tokens_need_an_eviction(tokens):
    """Nothing is known of queries yet when they come, so they are read first."""
    model = make_llama()
    cache = make_prompt_cache(model)
    model(tokens[None, :60], cache=cache)
    request = Request(model, ExpectedAttention(**SIZE), 20, cache)
    with request.recording():
        for part in (tokens[60:64], tokens[64:80]):
            model(part[None], cache=request.caches)
    report = request.compress()
    assert report.entries == 40 and all(c.offset == 80 for c in cache)


def test_without_statistics_it_is_one_sentence():
    keys = mx.zeros((1, H, 6, D))
    with pytest.raises(SnapKVError, match="prefill with mlx_snapkv"):
        ExpectedAttention().score(Entries(keys, keys))
