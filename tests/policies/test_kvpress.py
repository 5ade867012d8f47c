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
T = len(TOKENS)


def policy_of(case):
    """The policy that keeps what the press does, with the whole prompt as one block."""
    *options, kept = RECORDED[f"{case}/settings"].tolist()
    policy = case.partition("/")[0]
    if policy in ("snapkv", "critical"):  # kvpress keeps no sink, and all recent entries observe
        window, kernel = options
        size = {"budget": kept, "n_sink": 0, "n_window": window, "obs_window": window}
        more = {"pool": "avg", "lookahead": 0, "critical": policy == "critical"}
        return SnapKV(pool_kernel=kernel, **size, **more)
    size = {"budget": kept, "block": T}
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
    cache, _ = prefill(demo_llama[0], TOKENS, policy_of(case))
    scores = RECORDED[f"{case}/scores"]
    for mine, theirs, by_head in zip(cache, RECORDED[f"{case}/positions"], scores, strict=True):
        for ours, wanted, score in zip(mine.positions[0], theirs, by_head, strict=True):
            differing = score[sorted({*ours.tolist()} ^ {*wanted.tolist()})]
            # Of entries with the same score, either choice is right.
            assert not differing.size or np.ptp(differing) <= 1e-6 * np.abs(differing).max()


@pytest.fixture(scope="module")
def full_caches(demo_llama):
    """The whole prompt's entries, with its last 32 queries and the statistics of all but the first 4."""
    model, _ = demo_llama
    caches = [RecordingKVCache(T - 32, T, T) for _ in model.layers]
    for layer, cache in zip(attention_layers(model, caches), caches):
        cache.layer, cache.statistics_from = layer, 4
    with recording([type(model.layers[0].self_attn)]):
        model(mx.array(TOKENS)[None], cache=caches)
    return caches


def compared(policy, ours, theirs, is_critical):
    """Both scores on one scale; what a press gives to the entries that it keeps anyway is left out."""
    if policy.name == "snapkv":  # kvpress averages the votes over the window, the paper sums them
        ours, theirs = (x[:, : T - policy.obs_window] for x in (ours, theirs))
        if not is_critical:
            return ours / policy.obs_window, theirs
        certain = [x > 1e20 for x in (ours, theirs)]  # what the first stage chose
        assert certain[0].sum() == certain[1].sum()
        return tuple(np.where(np.any(certain, 0), 0, x) for x in (ours, theirs))
    return {
        "expected_attention": lambda: (np.exp(ours[:, 4:]), theirs[:, 4:]),
        "tova": lambda: (ours[:, :-1], theirs[:, :-1]),
        "key_norm": lambda: (-np.sqrt(-ours), theirs),
        "lagkv": lambda: (np.minimum(ours, 1), theirs),  # the newest of those not compared
        "keydiff": lambda: (ours, theirs),
    }[policy.name]()


@pytest.mark.parametrize("case", [case for case in CASES if "streaming_llm" not in case])
def test_scores_agree_up_to_their_scale(full_caches, case):
    policy = policy_of(case)
    for cache, expected in zip(full_caches, RECORDED[f"{case}/scores"]):
        entries = Entries(*cache.keys_and_values(), layer=cache.layer, statistics=cache.statistics)
        entries.budget = RECORDED[f"{case}/settings"].tolist()[-1]
        if policy.obs_window:
            last = cache.queries[:, :, -policy.obs_window :]
            entries.observed = Queries(last, range(T - policy.obs_window, T), cache.scale)
        scores = np.asarray(policy.score(entries))[0]
        ours, theirs = compared(policy, scores, expected, case.startswith("critical"))
        exact = {"rtol": 1e-4, "atol": 3e-6}
        if policy.name == "expected_attention":  # exponentials of large numbers
            exact = {"rtol": 2e-3, "atol": 1e-37}
        assert np.allclose(ours[:, : theirs.shape[1]], theirs, **exact)
