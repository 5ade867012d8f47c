"""Prompt chunks are read in pieces if their scores would take too much memory."""

import gc

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import llama
from model_configs import make_model
from request_helpers import plain, steps

from mlx_snapkv import KeyDiff, prefill
from mlx_snapkv.planning import scores
from mlx_snapkv.planning.scores import tokens_at_once

N = 600
TOKENS = mx.array(np.random.default_rng(0).integers(1, 128, 1000))
WIDE = {"head_dim": 256, "hidden_size": 128, "num_hidden_layers": 2, "num_key_value_heads": 1}
PAIR = 4 * 4  # bytes of float32 scores of 4 heads
SNAPKV = {"policy": "snapkv:top_k=128,n_window=64"}
WAYS = {
    "snapkv": (SNAPKV, 1e-4),
    "dense": ({"sparse": "top_k=128,read=dense,when=always"}, 1e-4),
    "sparse": (
        {"sparse": "top_k=128,read_top_k=128,when=always"},
        0.5,
    ),  # each piece chooses separately, so answers differ
}


@pytest.fixture
def calls(monkeypatch):
    """Return a list of the model's calls, each as (number of tokens, number of entries in the cache before them)."""
    found, call = [], llama.Model.__call__

    def counted(self, inputs, cache=None, **kwargs):
        found.append((inputs.shape[1], cache[0].n_entries if hasattr(cache[0], "record") else 0))
        return call(self, inputs, cache=cache, **kwargs)

    monkeypatch.setattr(llama.Model, "__call__", counted)
    return found


def peak(run):
    """Return the peak memory of `run`, in addition to the memory in use before."""
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    run()
    return mx.get_peak_memory() - before


@pytest.mark.parametrize("way, most", WAYS.values(), ids=WAYS)
def test_no_call_stores_more_scores_than_the_limit(way, most, calls, monkeypatch):
    """Reading in pieces must not change the predictions."""
    model = make_model("llama", WIDE)
    wanted = steps(model, TOKENS[:N], 3, **way)
    monkeypatch.setattr(scores, "MAX_SCORE_BYTES", limit := 1 << 20)
    assert max(PAIR * n * (before + n) for n, before in calls) > 2 * limit
    calls.clear()
    found = steps(model, TOKENS[:N], 3, **way)
    assert max(PAIR * n * (before + n) for n, before in calls) <= limit
    assert [token for token, _ in found] == [token for token, _ in wanted]
    assert max(mx.abs(a - b).max().item() for (_, a), (_, b) in zip(found, wanted)) < most


def test_the_peak_is_a_fraction_of_mlx_lm_s(monkeypatch):
    """A chunk in mlx-lm stores all scores. Ours stores at most the limit, the entries, and one piece's arrays."""
    model, limit, n = make_model("llama", WIDE | {"num_attention_heads": 8}), 2 << 20, 1000
    monkeypatch.setattr(scores, "MAX_SCORE_BYTES", limit)
    theirs = peak(lambda: plain(model, TOKENS[:n], 2))
    ours = peak(lambda: steps(model, TOKENS[:n], 2, **WAYS["dense"][0]))
    pair, entries = 8 * 4, 2 * 2 * 4 * 256 * n
    of_piece = 4 * 4 * 8 * 256 * tokens_at_once(0, pair, limit)
    most = 1.25 * (limit + 2 * entries + of_piece)
    assert theirs > pair * n * n and ours < most < 0.4 * theirs


def test_chunks_are_not_split_without_need(calls, monkeypatch):
    """Three cases: fused heads, blocks between evictions, and prompts left to mlx-lm."""
    monkeypatch.setattr(scores, "MAX_SCORE_BYTES", 1 << 20)
    plain(model := make_model("llama", WIDE), TOKENS[:N], 1)
    steps(model, TOKENS[:N], 1, policy="snapkv:top_k=4096")
    assert calls == 2 * [(N - 1, 0), (1, 0), (1, 0)]
    prefill(model, TOKENS[:N], KeyDiff(budget=256, block=200))
    assert max(n for n, _ in calls[6:]) == 200
    monkeypatch.setattr(scores, "on_gpu", lambda: True)
    calls.clear()
    steps(make_model("llama", WIDE | {"head_dim": 128}), TOKENS[:N], 1, policy="snapkv:top_k=128")
    assert max(n for n, _ in calls) == N - 1
