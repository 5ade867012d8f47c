"""Every policy in every way that it can be asked for: alone, as a stage, over recalled entries."""

import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from request_helpers import steps
from tiny_models import make_llama, make_qwen

from mlx_snapkv import SnapKVError
from mlx_snapkv.policies import POLICIES, resolve_policy

OWN = {
    "snapkv": "n_sink=2,obs_window=8,lookahead=0,",
    "lagkv": "lag_size=8,",
    "scissorhands": "obs_window=8,",
}
NAMES = [*POLICIES, "snapkv:critical"]
SNAPKV = "snapkv:top_k=8,n_sink=4,n_window=16,obs_window=8,lookahead=0"
KEYDIFF = "keydiff:budget=60,block=16"
# A policy's text, {} for its budget and schedule, and what else is asked for.
WAYS = {
    "once": ("{once}", {}),
    "block": ("{block}", {}),
    "first stage": (f"{{block}} then {SNAPKV}", {}),
    "pyramid": ("{pyramid}", {}),
    "a book": (f"{KEYDIFF} then {{once}}", {"memory": "recall:file"}),
}


def text_of(name, way):
    name, _, option = name.partition(":")
    own = OWN.get(name, "") + (f"{option}=true," if option else "")
    own += "" if name == "streaming_llm" else "n_window=8,"
    kinds = {"once": "40", "pyramid": "pyramid:40"}
    texts = {k: f"{name}:{own}schedule=once,budget={v}" for k, v in kinds.items()}
    return way.format(block=f"{name}:{own}schedule=block,block=16,budget=40", **texts)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_a_request_is_served(name, way, tokens):
    """A hybrid model's, of policies that are asked for alone."""
    pattern, options = WAYS[way]
    model = make_qwen() if way in ("once", "block") else make_llama()
    text = text_of(name, pattern)
    if name == "kvzip" and way in ("block", "first stage", "a book"):
        with pytest.raises(SnapKVError, match=r"kvzip (option schedule|reads all)"):
            steps(model, tokens, policy=text, **options)
        return
    policy, reports = resolve_policy(policy=text), []
    options = options | {"policy": policy, "on_report": reports.append}
    if "memory" in options and any(stage.accumulates_attention for stage in policy.stages):
        with pytest.raises(SnapKVError, match="counts the attention of all"):
            steps(model, tokens, **options)
        return
    items = steps(model, tokens, n=20, prompt_cache=make_prompt_cache(model), **options)
    assert len(items) == 20 and all(np.isfinite(np.asarray(p)).all() for _, p in items)
    (report,) = reports
    kept = [n for n in report.entries_kept if n is not None]
    assert report.compressed and report.reason is None
    if way == "once":
        votes = policy.obs_window or policy.accumulates_attention
        assert (report.attention_share[-1] is not None) == bool(votes)
    assert sum(kept) == len(kept) * (28 if way == "first stage" else 40)
