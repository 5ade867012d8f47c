"""Batched requests with sparse attention get the same answers as alone, and their caches serve follow-up requests."""

import copy
from dataclasses import replace

import mlx.core as mx
import pytest
from batch_helpers import Run, prompts_of
from entry_helpers import count_indexes, exact_up_to
from mlx_lm.models.cache import make_prompt_cache
from request_helpers import assert_unpatched
from tiny_models import make_llama

from mlx_snapkv import Sparse
from mlx_snapkv.server.prefix_cache import PrefixCache

PLAIN = "snapkv:n_sink=4,n_window=32,obs_window=32,min_ctx=100,budget=56"
SNAPKV = f"{PLAIN},lookahead=4"
SPARSE = Sparse(budget=80, n_window=32, read_top_k=32, when="always")
WAYS = [
    SNAPKV,
    SPARSE,
    replace(SPARSE, store="8bit"),
    replace(SPARSE, store="file"),
]


@pytest.fixture(scope="module")
def model():
    return make_llama(hidden_size=128)


@pytest.mark.parametrize("policy", WAYS, ids=str)
def test_staggered_requests_answer_as_by_themselves(model, policy):
    prompts, limits = prompts_of(190, 40, 260), [12, 40, 25]
    run = Run(model, policy)
    uids = run.staggered(prompts, limits)
    run.assert_alone(uids, prompts, limits)
    # uids[1] has a short prompt, which is left to mlx-lm.
    assert list(run.read) and set(run.read) == set(uids) - {uids[1]}
    for uid, (_, tokens) in run.read.items():
        prompt = prompts[uids.index(uid)]
        assert tokens == (prompt + run.answers[uid])[: len(tokens)] and len(tokens) >= len(prompt)
    assert_unpatched()


@pytest.mark.parametrize("policy", WAYS, ids=str)
def test_several_requests_continue_from_copies_of_one_requests_caches(model, policy):
    """No request sees another's question."""
    (document,) = prompts_of(200)
    run = Run(model, policy, turns=True)
    (first,) = run.insert([document], 8)
    run.finish()
    caches, tokens = run.read[first]
    questions = prompts_of(12, 40, seed=1)
    given = [copy.deepcopy(caches) for _ in questions]
    uids = run.insert(questions, 10, caches=given, all_tokens=[list(tokens) for _ in questions])
    run.finish()
    for uid, question in zip(uids, questions):
        assert run.answers[uid] == run.alone(question, 10, prompt_cache=copy.deepcopy(caches))
        assert run.read[uid][1][: len(tokens) + len(question)] == tokens + question


@pytest.mark.parametrize("store", ["memory", "8bit", "file"])
def test_several_requests_share_the_index_of_one_requests_caches(model, store, monkeypatch):
    """Each request continues from the first one's caches, trimmed to the prefix that the two share."""
    exact_up_to(monkeypatch, 100)
    made = count_indexes(monkeypatch)
    (document,) = prompts_of(200)
    prefixes = PrefixCache(1 << 32)
    run = Run(model, replace(SPARSE, store=store), turns=True)
    run.insert([document], 8)
    run.finish()
    ((caches, tokens),) = run.read.values()
    prefixes.insert(tokens, caches)
    assert prefixes.nbytes == sum(cache.nbytes + cache.index.codes.nbytes for cache in caches)
    uids, asked = [], [document[:160] + question for question in prompts_of(40, 60, seed=1)]
    for prompt in asked:
        caches, n = prefixes.fetch(prompt, 32)
        assert n == 160
        uids += run.insert([prompt[n:]], 12, caches=[caches], all_tokens=[prompt[:n]])
    run.finish()
    assert len(made) == len(model.layers)
    for uid, prompt in zip(uids, asked):
        read, _ = run.read[uid]
        assert {cache.offset for cache in read} == {len(prompt) + 1}
        assert {len(cache.index) for cache in read} == {len(prompt) + 1}


def test_a_removed_request_leaves_its_caches_for_others(model):
    prompts = prompts_of(200, 150)
    run = Run(model, SNAPKV)
    gone, stays = run.insert(prompts, 40)
    while len(run.answers.get(gone, [])) < 7:
        run.step()
    run.generator.remove([gone])
    run.finish()
    assert run.answers[stays] == run.alone(prompts[1], 40)
    caches, tokens = run.read[gone]
    full = make_prompt_cache(model)
    model(mx.array([tokens]), cache=full)
    assert [c.offset for c in caches] == [len(tokens)] * len(caches)
    for mine, plain in zip(caches, full):
        assert mx.allclose(mine.keys_and_values()[0], plain.keys_and_values()[0], atol=1e-4)
    assert_unpatched()
