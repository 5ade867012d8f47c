"""Model types with every kind of cache and attention answer in a batch as they do alone, or are rejected by name."""

import pytest
from batch_helpers import Run, prompts_of
from entry_helpers import exact_up_to
from model_configs import make_model

from mlx_snapkv import SnapKVError, Sparse
from mlx_snapkv.batch.generator import UNBATCHED_TYPES
from mlx_snapkv.caches.layers import all_caches

SPARSE = Sparse(top_k=6, n_sink=2, n_window=8, store="file")
POLICY = "snapkv:top_k=6,n_sink=2,n_window=8,obs_window=8,lookahead=0"
TYPES = [
    "deepseek_v3", "falcon_h1", "gemma3n", "gpt_oss", "kimi_linear", "llama4_text", "longcat_flash",
    "minicpm3", "plamo2", "qwen3_5",
]  # fmt: skip
# For sparse attention: a plain model, a hybrid, attention sinks.
CHOOSING = ["llama", "qwen3_next", "gpt_oss"]


@pytest.mark.parametrize(
    ("name", "policy", "few"),
    [
        *((name, POLICY, 0) for name in [*TYPES, *UNBATCHED_TYPES]),
        *((name, SPARSE, 0) for name in CHOOSING),
        ("llama", SPARSE, 8192),  # too short for an index
    ],
)
def test_a_batch_answers_as_each_request_by_itself(name, policy, few, monkeypatch):
    exact_up_to(monkeypatch, few)
    model = make_model(name)
    prompts = prompts_of(40, 30, 55, vocab_size=120)
    try:
        run = Run(model, policy)
    except SnapKVError as error:
        assert name in UNBATCHED_TYPES and "one at a time" in str(error)
        return
    uids = run.insert(prompts[:2], [14, 9])
    for _ in range(4):
        run.step()
    uids += run.insert(prompts[2:], [10])
    sizes = set()
    while run.step():
        caches = all_caches(run.generator._generation_batch.prompt_cache)
        sizes |= {len(cache.request_caches) for cache in caches if hasattr(cache, "request_caches")}
    assert max(sizes) > 1
    run.assert_alone(uids, prompts, (14, 9, 10))
