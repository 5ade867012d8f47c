"""Agreement with a published implementation: kvpress' presses, recorded by `scripts/record_kvpress.py`."""

import dataclasses
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import reference

from mlx_snapkv import KVzip, SnapKV, prefill
from mlx_snapkv.policies import POLICIES, lagkv

RECORDED = np.load(Path(__file__).parents[1] / "fixtures" / "kvpress.npz")
CASES = sorted(  # KVzip's are read another way
    {n.rpartition("/")[0] for n in RECORDED.files if "/" in n and not n.startswith("kvzip")}
)
TOKENS = RECORDED["tokens"].tolist()
T = len(TOKENS)


def policy_of(case):
    """The policy that keeps what the press does, with the whole prompt as one block."""
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
            # Of entries with the same score, either choice is right.
            assert not differing.size or np.ptp(differing) <= 1e-6 * np.abs(differing).max()


@pytest.fixture
def scores(monkeypatch):
    """By layer, the scores that a compression ranks the entries by."""
    found = []
    monkeypatch.setattr(KVzip, "score", lambda self, e: found.append(e.repeated) or e.repeated)
    return found


@pytest.mark.parametrize("chunk, step", [(2048, 2048), (200, 64)])
def test_scores_and_positions_equal_kvpress(demo_llama, scores, chunk, step):
    """Each head's best, as its scores rank them: the press itself drops entries of all layers and heads at once."""
    leads = [row[row >= 0].tolist() for row in RECORDED[f"kvzip/{chunk}/leads"]]

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Asking(KVzip):
        """Feeds what kvpress was recorded to feed."""

        repeats = chunk

        def lead_in(self, tokens, start):
            return mx.array(leads[start // chunk])

    policy = Asking(budget=96, n_window=1)
    cache, _ = prefill(demo_llama[0], TOKENS, policy, prefill_step_size=step)
    wanted = RECORDED[f"kvzip/{chunk}/scores"]
    assert np.allclose(np.exp2(np.array(scores))[:, 0], wanted, rtol=2e-3, atol=2e-6)
    for layer, theirs in zip(cache, wanted, strict=True):
        for head, positions in zip(theirs, layer.positions[0].tolist(), strict=True):
            differing = sorted({*positions} ^ {*reference.select(head, 4, 91, 1)})
            assert not differing or np.ptp(head[differing]) <= 1e-5  # weights of nearly 1
