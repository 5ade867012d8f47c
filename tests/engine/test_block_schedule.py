"""Requests with block policies, which evict entries during prefill."""

import mlx.core as mx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache
from request_helpers import assert_same, plain, steps
from saved_helpers import spec
from tiny_models import make_llama, make_qwen

from mlx_snapkv import BlockKVCache, SnapKVCache, prefill
from mlx_snapkv.compress.policy import POLICIES

pytestmark = pytest.mark.usefixtures("short_blocks")


def compressed(prompt_cache):
    return [c for c in prompt_cache if isinstance(c, (BlockKVCache, SnapKVCache))]


LLAMA = make_llama()


@settings(max_examples=40)
@given(
    prompt=st.integers(1, 120),
    step=st.integers(1, 60),
    block=st.integers(1, 50),
    budget=st.integers(18, 90),
    answer=st.integers(1, 20),
    name=st.sampled_from(sorted(POLICIES)),
)
@example(prompt=1, step=1, block=1, budget=18, answer=18, name="expected_attention")
def test_no_prompt_chunk_block_or_answer_breaks_the_budget(
    prompt, step, block, budget, answer, name
):
    sizes = []
    original = BlockKVCache.update_and_fetch

    def watched(self, keys, values):
        out = original(self, keys, values)
        sizes.extend(x.shape[2] for x in (self.keys, self.values, *out))
        return out

    cache = make_prompt_cache(LLAMA)
    policy = spec(name, "block", budget, block).replace("lookahead=2", "lookahead=0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockKVCache, "update_and_fetch", watched)
        options = {"policy": policy, "prompt_cache": cache, "prefill_step_size": step}
        items = steps(LLAMA, mx.arange(prompt) % 60, n=answer, **options)
    assert len(items) == answer and {c.offset for c in cache} == {prompt + answer}
    assert max(sizes, default=0) <= budget + block
    if prompt > budget:
        assert sizes and all(c.size() <= budget + block for c in cache)
    if sizes:
        assert all(p.tolist() == sorted(set(p.tolist())) for c in cache for p in c.positions[0])


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("make, budget", [(make_llama, 190), (make_llama, 19), (make_qwen, 40)])
def test_one_block_equals_once(tokens, name, make, budget):
    model = make()
    block, _ = prefill(model, tokens, spec(name, "block", budget, block=200))
    slides = ",on_full=slide" if name == "snapkv" else ""
    once, _ = prefill(model, tokens, spec(name, "once", budget, block=200) + slides)
    for a, b in zip(compressed(block), compressed(once), strict=True):
        assert isinstance(a, BlockKVCache) and isinstance(b, SnapKVCache)
        assert mx.array_equal(a.positions, b.positions)
        assert mx.array_equal(a.keys_and_values()[0], b.keys)


@pytest.mark.parametrize("make", [make_llama, make_qwen])
def test_a_budget_that_holds_everything_equals_mlx_lm_bit_for_bit(make, tokens):
    model, tokens = make(), tokens[:100]
    expected = plain(model, tokens, n=6, prefill_step_size=16)
    for name in POLICIES:
        for budget in (106, 103):  # 103 has room for the prompt, but not for the answer
            cache, reports = make_prompt_cache(model), []
            options = {"prompt_cache": cache, "prefill_step_size": 16, "on_report": reports.append}
            items = steps(model, tokens, n=6, policy=spec(name, "block", budget), **options)
            assert_same(items, expected)
            assert "fit the budget" in reports[0].reason
            assert bool(compressed(cache)) == (budget == 103)
