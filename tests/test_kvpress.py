"""Agreement with a published implementation: kvpress' SnapKVPress, recorded by `scripts/record_kvpress.py`."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_snapkv import SnapKV, prefill
from mlx_snapkv.capture import recording
from mlx_snapkv.compress import compress_prompt_cache
from mlx_snapkv.recorder import RecordingKVCache
from mlx_snapkv.votes import Rows

RECORDED = np.load(Path(__file__).parent / "fixtures" / "kvpress_snapkv.npz")
CASES = sorted({name.split("/")[0] for name in RECORDED.files if "/" in name})


def policy_of(case):
    """kvpress keeps no sink, and its observation window is its recent window."""
    window, kernel, kept = RECORDED[f"{case}/settings"].tolist()
    return SnapKV(
        top_k=kept - window,
        n_sink=0,
        n_window=window,
        obs_window=window,
        pool_kernel=kernel,
        min_ctx=0,
    )


@pytest.mark.parametrize("case", CASES)
def test_kept_positions_are_equal_for_every_layer_and_head(demo_llama, case):
    model, _ = demo_llama
    cache, _ = prefill(model, RECORDED["tokens"].tolist(), policy_of(case))
    expected = RECORDED[f"{case}/positions"]
    for layer, (mine, theirs) in enumerate(zip(cache, expected)):
        for head in range(len(theirs)):
            differing = set(mine.positions[0, head].tolist()) ^ set(theirs[head].tolist())
            assert not differing or are_ties(case, layer, head, differing)


def are_ties(case, layer, head, positions):
    """Whether rows that only one side kept had the same score to the other: either choice is right."""
    scores = RECORDED[f"{case}/scores"][layer, head][sorted(positions)]
    return np.ptp(scores) <= 1e-6 * scores.max()


@pytest.mark.parametrize("case", CASES)
def test_scores_agree_up_to_their_scale(demo_llama, case):
    """kvpress averages the votes over the window, we sum them as the paper does."""
    model, _ = demo_llama
    tokens = mx.array(RECORDED["tokens"])
    policy = policy_of(case)
    T, window = tokens.size, policy.obs_window
    caches = [RecordingKVCache(T - window, T, T) for _ in model.layers]
    with recording([type(model.layers[0].self_attn)]):
        model(tokens[None], cache=caches)
    for cache, expected in zip(caches, RECORDED[f"{case}/scores"]):
        keys, values = cache.keys_and_values()
        rows = Rows(keys, values, cache.queries, mx.arange(T - window, T), cache.scale)
        scores = np.asarray(policy.score(rows))[0, :, :-window] / window
        assert np.allclose(scores, expected[:, :-window], atol=3e-6)


def test_the_fixture_is_of_this_checkpoint(demo_llama):
    """A retrained model needs a new recording."""
    model, _ = demo_llama
    caches = [RecordingKVCache(0, 1, RECORDED["tokens"].size) for _ in model.layers]
    with recording([type(model.layers[0].self_attn)]):
        model(mx.array(RECORDED["tokens"])[None], cache=caches)
    assert compress_prompt_cache(model, caches, SnapKV()).reason
