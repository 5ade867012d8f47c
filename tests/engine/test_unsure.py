"""verify="unsure": what a doubtful token's own queries vote for is gathered, and it is decoded again."""

import dataclasses

import mlx.core as mx
import numpy as np
import pytest
import reference
from request_helpers import assert_unpatched, plain, steps
from tiny_models import make_llama

from mlx_snapkv import SnapKV, stream_generate
from mlx_snapkv.caches.decode import decode_cache
from mlx_snapkv.caches.layers import attention_layers
from mlx_snapkv.caches.memories import make_caches
from mlx_snapkv.caches.recollection import Recollection
from mlx_snapkv.engine import unsure
from mlx_snapkv.engine.gathering import FADING, Gathering
from mlx_snapkv.engine.prefill import read
from mlx_snapkv.engine.report import Verified
from mlx_snapkv.entries.entries import Entries
from mlx_snapkv.models import attention_classes
from mlx_snapkv.models.patch import recording

RECALLING = ["recall", "recall:8bit", "recall:4bit", "recall:file"]
POLICY = SnapKV(
    top_k=20, n_sink=4, n_window=16, obs_window=8, lookahead=0, pool="avg", pool_kernel=5
)
# So few that not all digits are always kept.
TINY = SnapKV(top_k=16, n_sink=4, n_window=28, obs_window=24, lookahead=0)


def newest_queries(layers, caches):
    return [np.array(layer.cache_in(caches).queries[:, :, -1:], np.float64) for layer in layers]


@pytest.mark.parametrize("memory", RECALLING)
def test_gathers_what_the_newest_query_votes_for_and_the_last_faded(memory, tokens):
    """Positions by NumPy in float64, from the keys as they are stored and the query that the layer used."""
    model = make_llama(head_dim=32)
    full = make_caches(model, memory)
    layers = attention_layers(model, full)
    for layer in layers:
        layer.cache_in(full).layer = layer
    read(model, tokens[:150], full, {})
    small = list(full)
    for layer in layers:
        cache = layer.cache_in(full)
        held = cache.held()
        first = mx.broadcast_to(mx.arange(40, dtype=mx.uint32), (1, 2, 40))
        quota, *_ = POLICY.quotas(150, 2)
        kept = Entries(held.keys, held.values).taken(first)
        layer.put(small, decode_cache(layer, kept, None, 150, POLICY, quota, True, True))
        cache.offload()
    everything = [Recollection(layer.cache_in(full).sources(), layer) for layer in layers]
    gathering = Gathering(layers, everything, small, POLICY, Verified("unsure"))
    with recording(attention_classes(model)):
        model(tokens[None, 150:156], cache=small)
        earlier = newest_queries(layers, small)
        gathering.gather(small)
        model(tokens[None, 156:157], cache=small)
    queries = newest_queries(layers, small)
    for layer in layers:
        layer.cache_in(small).rollback(1)
    keys = [np.array(one.keys(0, 156), np.float64) for one in everything]
    gathering.gather(small)
    for layer, before, query, own_keys in zip(layers, earlier, queries, keys):
        scale = layer.cache_in(small).scale
        votes = reference.votes(query, own_keys, [156], scale)
        votes += FADING * reference.votes(before, own_keys, [155], scale)
        found = np.array(layer.cache_in(small).positions)
        for head in range(2):
            middle = votes[0, head, 4:140]
            votes[0, head, 4:140] = reference.pool(middle, "avg", 5)
            assert list(found[0, head]) == reference.select(votes[0, head], 4, 20, 16)
    assert_unpatched()


@pytest.mark.parametrize("memory", ["recall", "recall:file"])
def test_with_room_for_all_it_is_the_full_caches_answer(tiny_model, tokens, memory):
    """Every token votes and is decoded twice: linear layers go back by one token, exactly."""
    policy = dataclasses.replace(POLICY, budget=190)
    found = steps(
        tiny_model, tokens[:180], 30, policy=policy, memory=memory, verify="unsure", verify_below=1.0
    )  # fmt: skip
    wanted = plain(tiny_model, tokens[:180], 30)
    assert [t for t, _ in found][:9] == [t for t, _ in wanted][:9]
    for (_, a), (_, b) in list(zip(found, wanted))[:9]:
        assert mx.allclose(a, b, atol=1e-4)


def n_right(loaded, ask, policy, **keywords):
    """How many of three questions are answered."""
    model, tokenizer = loaded
    right = 0
    for seed in range(3):
        tokens, fact = ask(tokenizer, 1500, seed=seed, n_facts=6)
        answer = stream_generate(model, tokenizer, tokens, 12, policy=policy, **keywords)
        right += fact.value in "".join(r.text for r in answer)
    return right


@pytest.mark.parametrize("memory", RECALLING)
def test_finds_what_nobody_has_voted_for(demo_llama, ask, memory):
    """Without lookahead and at 1/30 of the entries answers are lost; with votes none is."""
    assert n_right(demo_llama, ask, TINY) < 3
    ways = {"memory": memory, "verify": "unsure", "verify_below": 0.999}
    assert n_right(demo_llama, ask, TINY, **ways) == 3


def test_finds_it_with_linear_layers_too(demo_qwen, ask):
    assert n_right(demo_qwen, ask, TINY, memory="recall", verify="unsure", verify_below=1.0) == 3


@pytest.mark.parametrize(
    "policy",
    [
        "keydiff:budget=48,n_window=16,schedule=once",
        "tova:budget=64,n_sink=4,n_window=16,schedule=once",
        "snapkv:top_k=16,n_sink=4,n_window=28,obs_window=24,heads=shared",
    ],
)
def test_every_policy_can_be_asked_again(demo_llama, ask, policy):
    model, tokenizer = demo_llama
    tokens, fact = ask(tokenizer, 1000, seed=2, n_facts=6)
    keywords = {"policy": policy, "memory": "recall", "verify": "unsure", "verify_below": 1.0}
    answer = stream_generate(model, tokenizer, tokens, 12, **keywords)
    assert fact.value in "".join(r.text for r in answer)


def verified_by(model, tokens, below, memory="recall", lookahead=0):
    """What is told of an answer of 30 tokens, in which no gathering falls due."""
    reports = []
    policy = SnapKV(top_k=20, n_sink=4, n_window=100, lookahead=lookahead)
    keywords = {"memory": memory, "verify": "unsure", "verify_below": below}
    steps(model, tokens, 30, policy=policy, on_report=reports.append, **keywords)
    return reports[0].verified


def votes_of(model, tokens, below):
    verified = verified_by(model, tokens, below)
    return verified.votes, verified.tokens


def test_votes_are_limited_but_not_when_every_token_is_to_vote(tokens, monkeypatch):
    monkeypatch.setattr(unsure, "VOTES_AT_FIRST", 4)
    model = make_llama()
    assert votes_of(model, tokens, 1.0) == (29, 29)
    votes, n_tokens = votes_of(model, tokens, 0.999)
    assert n_tokens == 29 and votes == 4 + 29 // 8


def test_a_sure_model_never_votes(tokens):
    votes, n_tokens = votes_of(make_llama(), tokens, 1e-6)
    assert n_tokens == 29 and votes == 0


@pytest.mark.parametrize("memory", ["recall", "recall:8bit", "recall:file"])
def test_an_answer_that_was_slower_says_so(tokens, memory):
    """Every token is decoded twice and votes; in files there are no entries to take the full cache's pace from."""
    verified = verified_by(make_llama(head_dim=32), tokens, 1.0, memory, lookahead=4)
    told = "26 votes in 26 tokens"
    if memory != "recall:file":
        told += f", {verified.gain:.2f} times as fast as the full cache "
        told += "(slower: lower verify_below, or leave verify out)"
        assert 0 < verified.gain < 1
    assert str(verified) == told


def test_an_answer_that_was_faster_is_not_warned_of():
    verified = Verified("unsure", tokens=20, votes=3, seconds=1.0, plain_seconds=0.1)
    assert str(verified) == "3 votes in 20 tokens, 2.00 times as fast as the full cache"


@pytest.mark.parametrize("memory", ["recall", "recall:8bit"])
def test_the_first_token_may_ask_again_with_fewer_bits(tokens, memory):
    """The small caches hold nothing then that the memory has not."""
    model = make_llama(head_dim=32)
    ways = {"memory": memory, "verify": "unsure", "verify_below": 1}
    found = steps(model, tokens, 8, policy=POLICY, kv_bits=8, kv_group_size=32, **ways)
    assert len(found) == 8
