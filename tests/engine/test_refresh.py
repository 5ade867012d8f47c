"""Answers whose every token chooses anew what it reads."""

import itertools

import mlx.core as mx
import numpy as np
import pytest
import reference
from mlx_lm.models.cache import make_prompt_cache
from model_configs import make_model
from request_helpers import plain, steps
from tiny_models import make_llama

from mlx_snapkv import generate_step
from mlx_snapkv.caches import full_view
from mlx_snapkv.caches.full_view import FullView
from mlx_snapkv.caches.layers import attention_layers
from mlx_snapkv.caches.recording import RecordingKVCache
from mlx_snapkv.caches.sparse import SparseKVCache
from mlx_snapkv.models import attention_classes
from mlx_snapkv.models.patch import recording
from mlx_snapkv.policies.budgets import Quota

# Grouped queries, latents, sinks, a hybrid, capped logits, entries that other layers borrow, keys of other modules.
FAMILIES = "llama deepseek_v3 gpt_oss qwen3_next gemma2 gemma3n minicpm3 gpt2".split()


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_with_room_for_all_but_one_it_is_the_full_answer(name, index, monkeypatch):
    monkeypatch.setattr(full_view, "FEW", 0 if index else 8192)
    model = make_model(name)
    prompt = mx.random.randint(0, 64, (100,), key=mx.random.key(0))
    full = plain(model, prompt, 8)

    def away(budget: int) -> float:
        policy = f"snapkv:budget={budget},n_sink=1,n_window=8,obs_window=8,lookahead=0"
        said = itertools.chain([token for token, _ in full], itertools.repeat(0))
        options = {"memory": "recall", "sampler": lambda _: mx.array([next(said)])}
        found = steps(model, prompt, 8, policy=policy, **options)
        return np.median([float(mx.abs(a - b).max()) for (_, a), (_, b) in zip(found, full)][1:])

    assert 0 < away(99) < 0.5 * away(20)  # which sees the rest by its means


def test_the_entries_read_are_those_of_the_tokens_own_votes():
    """By NumPy: softmax of the token's queries over all entries, the mean of a group; beside sink and window."""
    model = make_llama(head_dim=32, num_hidden_layers=1)
    tokens = mx.random.randint(0, 64, (1, 120), key=mx.random.key(0))
    caches = make_prompt_cache(model)
    (layer,) = attention_layers(model, caches)
    layer.put(caches, RecordingKVCache(0, 120, 120, layer))
    with recording(attention_classes(model)):
        model(tokens[:, :119], cache=caches)
        full = layer.cache_in(caches)
        keys = np.array(full.keys_and_values()[0])
        everything = FullView(full.views(), layer)
        cache = SparseKVCache(everything, Quota(30, 2, 8), layer)
        seen = []
        gather = everything.gather
        everything.gather = lambda places: seen.append(np.array(places)) or gather(places)
        caches[0] = cache
        model(tokens[:, 119:], cache=caches)
        mx.eval(cache.state)
        model_cache = make_prompt_cache(model)
        layer.put(model_cache, asked := RecordingKVCache(119, 120, 120, layer))
        model(tokens, cache=model_cache)
    scale = layer.family.scale_of(layer.attention, 32)
    votes = reference.votes(asked.queries, keys, [119], scale)[0]
    for head, of_head in enumerate(votes):
        assert set(seen[0][0, head]) == {*(2 + np.argsort(-of_head[2:111])[:20])}
    assert cache.n_entries == 30 + 1 and cache.offset == 120


def test_a_model_that_reads_its_caches_itself_is_served_by_one_choice():
    model = make_model("iquestloopcoder")
    prompt = mx.random.randint(0, 64, (100,), key=mx.random.key(0))
    reports = []
    policy = "snapkv:budget=40,n_sink=4,n_window=16,obs_window=8,lookahead=0"
    found = steps(model, prompt, 6, policy=policy, memory="recall", on_report=reports.append)
    wanted = steps(model, prompt, 6, policy=policy, memory="recall", refresh="turn")
    assert reports[0].refreshed is None
    assert all(mx.array_equal(a, b) for (_, a), (_, b) in zip(found, wanted))


@pytest.mark.parametrize("options", [{}, {"verify": "all"}, {"refresh": "turn"}])
def test_tokens_that_choose_by_themselves_begin_at_once(options):
    """The first was computed together with the prompt's end, on all entries; the second chooses already."""
    model, reports = make_llama(), []
    prompt = mx.random.randint(0, 64, (100,), key=mx.random.key(0))
    policy = "snapkv:budget=40,n_sink=4,n_window=16,obs_window=8,lookahead=32"
    options = {"policy": policy, "memory": "recall", "on_report": reports.append, **options}
    answer = generate_step(prompt, model, max_tokens=40, **options)
    n_before = next(n for n, _ in enumerate(answer, start=1) if reports)
    chooses = reports[0].refreshed is not None
    assert (n_before, chooses) == ((32, False) if options.get("refresh") else (1, True))
    assert len(list(answer)) == 40 - n_before
