"""Every policy in every way that requests can use it: alone, or as one of two stages."""

import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from request_helpers import steps
from saved_helpers import KEYDIFF, spec
from tiny_models import make_llama, make_qwen

from mlx_snapkv.compress.policy import POLICIES
from mlx_snapkv.planning.settings import resolve_compress

pytestmark = pytest.mark.usefixtures("short_blocks")

LAST = "snapkv:top_k=8,n_sink=4,n_window=16,obs_window=8,lookahead=0"


def text_of(name, way):
    schedule = "block" if way in ("block", "first stage") else "once"
    text = spec(name, schedule)
    return {"first stage": f"{text} then {LAST}", "last stage": f"{KEYDIFF} then {text}"}.get(
        way, text
    )


@pytest.mark.parametrize("way", ["once", "block", "first stage", "last stage"])
@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_serves_a_request(name, way, tokens):
    """Policies that evict during prefill run on a hybrid model."""
    text = text_of(name, way)
    model = make_qwen() if way == "block" else make_llama()
    compress, reports = resolve_compress(policy=text), []
    policy = compress.decode_policy
    options = {"policy": policy, "on_report": reports.append}
    items = steps(model, tokens, n=20, prompt_cache=make_prompt_cache(model), **options)
    assert len(items) == 20 and all(np.isfinite(np.asarray(p)).all() for _, p in items)
    (report,) = reports
    kept = [n for n in report.entries_kept if n is not None]
    assert report.compressed and report.reason is None
    if way == "once":
        votes = policy.obs_window or policy.accumulates_attention
        assert (report.attention_share[-1] is not None) == bool(votes)
    assert sum(kept) == len(kept) * (28 if way == "first stage" else 40)
