"""The kept positions equal those of kvpress's presses, as recorded by `scripts/record_kvpress.py`."""

from pathlib import Path

import numpy as np
import pytest

from mlx_snapkv import SnapKV, prefill
from mlx_snapkv.compress.policies import lagkv
from mlx_snapkv.compress.policy import POLICIES

RECORDED = np.load(Path(__file__).parents[1] / "fixtures" / "kvpress.npz")
CASES = sorted({n.rpartition("/")[0] for n in RECORDED.files if "/" in n})
TOKENS = RECORDED["tokens"].tolist()
T = len(TOKENS)


def policy_of(case):
    """Return the policy that keeps what a press keeps, with the whole prompt as one block."""
    *options, kept = RECORDED[f"{case}/settings"].tolist()
    name = case.partition("/")[0]
    own = {"budget": kept, "block": T}
    if name == "snapkv":  # kvpress keeps no sink, and all recent entries observe
        window, kernel = options
        own = {"budget": kept, "n_sink": 0, "n_window": window, "obs_window": window}
        return SnapKV(**own, pool_kernel=kernel, pool="avg", lookahead=0)
    if name not in ("tova", "streaming_llm"):
        own["n_window"] = 0
    if name == "keydiff":
        own["n_sink"] = 0
    return POLICIES[name](**own)


@pytest.mark.parametrize("case", CASES)
def test_kept_positions_are_equal_for_every_layer_and_head(demo_llama, case, monkeypatch):
    if case.startswith("lagkv") and not case.endswith("/128"):
        monkeypatch.setattr(lagkv, "LAG", int(case.partition("/")[2]))
    cache, _ = prefill(demo_llama[0], TOKENS, policy_of(case))
    scores = RECORDED[f"{case}/scores"]
    for mine, theirs, by_head in zip(cache, RECORDED[f"{case}/positions"], scores, strict=True):
        for ours, wanted, score in zip(mine.positions[0], theirs, by_head, strict=True):
            differing = score[sorted({*ours.tolist()} ^ {*wanted.tolist()})]
            # Entries with equal scores may differ.
            assert not differing.size or np.ptp(differing) <= 1e-6 * np.abs(differing).max()
