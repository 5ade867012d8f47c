"""The entries of answers longer than the recent window, with on_full=grow and on_full=slide."""

import pytest
from mlx_lm.models.cache import make_prompt_cache
from request_helpers import plain, steps

from mlx_snapkv import BlockKVCache, SnapKV, SnapKVCache, SnapKVError, prefill
from mlx_snapkv.models import attention_classes
from mlx_snapkv.models.patch import recording

SMALL = {"budget": 56, "n_sink": 4, "n_window": 32, "obs_window": 8, "lookahead": 0}


def kept(cache):
    return [c for c in cache if isinstance(c, (SnapKVCache, BlockKVCache))]


def answer(model, tokens, n, on_full, **changes):
    cache, reports = make_prompt_cache(model), []
    policy = SnapKV(**SMALL | changes, on_full=on_full)
    steps(model, tokens, n, policy=policy, prompt_cache=cache, on_report=reports.append)
    return kept(cache), reports[0]


def test_grow_keeps_every_entry_of_the_answer(tiny_model, tokens):
    caches, report = answer(tiny_model, tokens, 150, "grow")
    assert report.entries == 56
    for cache in caches:
        assert cache.size() == 56 + 150  # 56 entries of the prompt, and the answer
        assert cache.positions[0, 0, -150:].tolist() == list(range(200, 350))


def test_sliding_keeps_one_shape_and_the_budget(tiny_model, tokens, monkeypatch):
    shapes = set()
    original = SnapKVCache.update_and_fetch

    def watched(self, keys, values):
        out = original(self, keys, values)
        shapes.update(x.shape for x in out)
        return out

    monkeypatch.setattr(SnapKVCache, "update_and_fetch", watched)
    caches, report = answer(tiny_model, tokens, 200, "slide")
    assert report.entries == 56 and report.reason is None
    assert {shape[2] for shape in shapes} == {56}
    for cache in caches:
        positions = set(cache.positions[0, 0].tolist())
        assert len(positions) == 56, "an entry is held twice"
        assert {0, 1, 2, 3, *range(400 - 32, 400)} <= positions


def test_missing_votes_are_reported(tokens, tiny_model):
    policy = SnapKV(**SMALL, schedule="block", block=16)
    cache, _ = prefill(tiny_model, tokens[:-1], policy)
    with pytest.raises(SnapKVError, match="were not recorded: use mlx_snapkv's generate_step, or"):
        plain(tiny_model, tokens[-1:], 60, prompt_cache=cache)
    cache, _ = prefill(tiny_model, tokens[:-1], policy)
    with recording(attention_classes(tiny_model)):
        assert len(plain(tiny_model, tokens[-1:], 60, prompt_cache=cache)) == 60
