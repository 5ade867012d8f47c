"""Agreement with a published implementation: kvpress' presses, recorded by `scripts/record_kvpress.py`."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_snapkv import (
    TOVA,
    ExpectedAttention,
    KeyDiff,
    KeyNorm,
    LagKV,
    SnapKV,
    StreamingLLM,
    prefill,
)
from mlx_snapkv.caches.layers import attention_layers
from mlx_snapkv.caches.recording import RecordingKVCache
from mlx_snapkv.entries.entries import Entries
from mlx_snapkv.entries.queries import Queries
from mlx_snapkv.models.patch import recording

RECORDED = np.load(Path(__file__).parents[1] / "fixtures" / "kvpress.npz")
CASES = sorted(  # KVzip's are in test_kvzip.py
    {n.rpartition("/")[0] for n in RECORDED.files if "/" in n and not n.startswith("kvzip")}
)
TOKENS = RECORDED["tokens"].tolist()


def policy_of(case):
    """The policy that keeps what the press does, with the whole prompt as one block."""
    *options, kept = RECORDED[f"{case}/settings"].tolist()
    policy = case.partition("/")[0]
    if policy in ("snapkv", "critical"):  # kvpress keeps no sink, and all recent entries observe
        window, kernel = options
        size = {"budget": kept, "n_sink": 0, "n_window": window, "obs_window": window}
        more = {"pool": "avg", "lookahead": 0, "critical": policy == "critical"}
        return SnapKV(pool_kernel=kernel, **size, **more)
    size = {"budget": kept, "block": len(TOKENS)}
    if policy == "lagkv":
        crosses = bool(options[1:])
        return LagKV(lag_size=options[0], cross_scoring=crosses, n_window=0, **size)
    return {
        "expected_attention": ExpectedAttention(n_window=0, **size),
        "keydiff": KeyDiff(n_window=0, **size),
        "key_norm": KeyNorm(n_window=0, **size),
        "tova": TOVA(**size),
        "streaming_llm": StreamingLLM(**size),
    }[policy]


@pytest.mark.parametrize("case", CASES)
def test_kept_positions_are_equal_for_every_layer_and_head(demo_llama, case):
    model, _ = demo_llama
    cache, _ = prefill(model, TOKENS, policy_of(case))
    expected = RECORDED[f"{case}/positions"]
    for layer, (mine, theirs) in enumerate(zip(cache, expected, strict=True)):
        assert mine.positions.shape[1:] == theirs.shape
        for head in range(len(theirs)):
            differing = set(mine.positions[0, head].tolist()) ^ set(theirs[head].tolist())
            assert not differing or are_ties(case, layer, head, differing)


def are_ties(case, layer, head, positions):
    """Whether rows that only one side kept had the same score to the other: either choice is right."""
    scores = RECORDED[f"{case}/scores"][layer, head][sorted(positions)]
    return np.ptp(scores) <= 1e-6 * np.abs(scores).max()


@pytest.fixture(scope="module")
def full_caches(demo_llama):
    """The whole prompt's rows, with its last 32 queries and the statistics of all but the first 4."""
    model, _ = demo_llama
    T = len(TOKENS)
    caches = [RecordingKVCache(T - 32, T, T) for _ in model.layers]
    for layer, cache in zip(attention_layers(model, caches), caches):
        cache.layer, cache.statistics_from = layer, 4
    with recording([type(model.layers[0].self_attn)]):
        model(mx.array(TOKENS)[None], cache=caches)
    return caches


@pytest.mark.parametrize("case", CASES)
def test_scores_agree_up_to_their_scale(full_caches, case):
    """What a press gives to the rows that it keeps anyway is left out of the comparison."""
    policy = policy_of(case)
    T = len(TOKENS)
    *_, kept = RECORDED[f"{case}/settings"].tolist()
    for cache, expected in zip(full_caches, RECORDED[f"{case}/scores"]):
        entries = Entries(*cache.keys_and_values(), layer=cache.layer, statistics=cache.statistics)
        entries.budget = kept
        if policy.obs_window:
            last = cache.queries[:, :, -policy.obs_window :]
            entries.observed = Queries(last, range(T - policy.obs_window, T), cache.scale)
        scores = np.asarray(policy.score(entries))[0]
        if policy.name == "snapkv":
            scores, expected = (x[:, : len(TOKENS) - policy.obs_window] for x in (scores, expected))
        if case.startswith("critical"):
            certain = [x > 1e20 for x in (scores, expected)]  # what the first stage chose
            assert certain[0].sum() == certain[1].sum()
            scores, expected = (np.where(np.any(certain, 0), 0, x) for x in (scores, expected))
        elif policy.name == "snapkv":
            # kvpress averages the votes over the window, we sum them as the paper does.
            scores = scores / policy.obs_window
        elif policy.name == "tova":
            expected = expected[:, :-1]
        elif policy.name == "key_norm":
            scores = -np.sqrt(-scores)
        elif policy.name == "expected_attention":
            scores, expected = np.exp(scores[:, 4:]), expected[:, 4:]
            assert np.allclose(scores, expected, rtol=2e-3, atol=1e-37)
            continue  # exponentials of large numbers
        elif policy.name == "lagkv":
            scores = np.minimum(scores, 1)  # we prefer the newest of those that are not compared
        elif policy.name == "streaming_llm":
            continue  # ones and zeros there, recency here: the positions say all
        assert np.allclose(scores[:, : expected.shape[1]], expected, rtol=1e-4, atol=3e-6)
