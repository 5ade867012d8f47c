"""Sparse attention with prompts longer than a model says it was trained to: what is read stands in line before it."""

import random

import mlx.core as mx
import numpy as np
import pytest
from entry_helpers import exact_up_to
from far_helpers import LENGTH, asked, short_model
from mlx_lm.models.cache import make_prompt_cache

from mlx_snapkv import generate_step, prefill
from mlx_snapkv.caches import full_view
from mlx_snapkv.caches.sparse import SparseKVCache
from mlx_snapkv.caches.token_ranking import TokenRanking
from mlx_snapkv.demo.questions import is_right, make_haystack, question_prompt
from mlx_snapkv.engine import shared_pages, sparse
from mlx_snapkv.engine.request import make_request
from mlx_snapkv.planning.config import CompressionConfig
from mlx_snapkv.planning.request_plan import plan_request
from mlx_snapkv.policies import resolve_method


@pytest.fixture(scope="module")
def short():
    return short_model("demo")


@pytest.mark.parametrize("n_pages", [1, 6])
def test_all_heads_read_the_pages_that_any_head_points_at_and_those_beside(
    n_pages, short, monkeypatch
):
    """By NumPy: of each head's attention between sink and window, the largest share that a page or a neighbour gets."""
    monkeypatch.setattr(shared_pages, "PAGES", n_pages)
    pages, attended, read = [], shared_pages.most_attended, []
    lined_up = full_view.FullView.lined_up

    def spied(layers, quota, n, voted):
        most, first, last = 0, 1, (n - 32) // 16
        for layer in layers:
            entries = voted(layer)
            weights = np.array(entries.attention)[0].sum(axis=1)[:, first * 16 : last * 16]
            votes = weights.reshape(entries.keys.shape[1], -1, last - first, 16).sum(axis=(1, 3))
            most = np.maximum(most, (votes / votes.sum(axis=1, keepdims=True)).max(axis=0))
        own, beside = most, 0.99 * np.pad(most, 1)
        most = np.maximum(np.maximum(beside[:-2], own), beside[2:])
        found = attended(layers, quota, n, voted)
        chosen = {place // 16 - first for place in found.tolist()}
        assert found.tolist() == [
            16 * (first + page) + i for page in sorted(chosen) for i in range(16)
        ]
        # A page's two neighbours may tie, the page itself comes before them.
        assert np.argmax(own) in chosen
        assert np.allclose(np.sort(most)[-n_pages:], np.sort(most[sorted(chosen)]))
        pages.append({*found.tolist()})
        return found

    def seen(self, places, *more):
        read.append(places)
        return lined_up(self, places, *more)

    monkeypatch.setattr(sparse, "most_attended", spied)
    monkeypatch.setattr(full_view.FullView, "lined_up", seen)
    conversation, right = asked(*short, 3000, sparse="budget=400,n_sink=4,n_window=32")
    assert all(right) and len(pages) == 4
    # No more is read than half of the trained length, and nothing twice.
    assert conversation.report.read_per_token == LENGTH // 2
    assert conversation.report.read_per_chunk <= LENGTH // 2
    assert not pages[-1] & {*read[-1].flatten().tolist()}


@pytest.mark.parametrize("length", [1500, 1505, 1511])
def test_what_all_heads_read_comes_before_window_and_latest_tokens(short, length, monkeypatch):
    """Though the last queries look at what stands there; a score that is not there must not be written to."""
    monkeypatch.setattr(shared_pages, "PAGES", 4)
    model, tokenizer = short
    made, init = [], TokenRanking.__init__

    def spied(self, prompt, quota, shared, start):
        init(self, prompt, quota, shared, start)
        made.append((shared, len(prompt) - quota.n_window))

    monkeypatch.setattr(TokenRanking, "__init__", spied)
    tokens = tokenizer.encode(make_haystack(tokenizer, random.Random(3), 4, 3000)[0])[:length]
    tokens += tokens[-85:]  # the latest 64 tokens are said again, at the end
    prompt = mx.array(tokens)
    for _ in generate_step(prompt, model, max_tokens=2, sparse="budget=400,n_sink=4,n_window=32"):
        pass
    assert len(made) == len(model.layers)
    for shared, stop in made:
        assert shared.size == 4 * 16 and stop == len(tokens) - sparse.AGAIN - 32
        assert shared.max().item() < stop


@pytest.mark.parametrize("length", [LENGTH + 1, LENGTH + 60, LENGTH + 200])
def test_just_beyond_the_trained_length_the_sink_is_turned_with_what_is_chosen(
    short, length, monkeypatch
):
    """Also if the tokens before those that come again are not too many."""
    made, init = [], SparseKVCache.__init__

    def spied(self, ranking, again):
        init(self, ranking, again)
        made.append((self, ranking.view))

    monkeypatch.setattr(SparseKVCache, "__init__", spied)
    model, tokenizer = short
    tokens = tokenizer.encode(make_haystack(tokenizer, random.Random(3), 4, 1500)[0])[:length]
    sparse = "budget=96,n_sink=4,n_window=32"
    list(generate_step(mx.array(tokens), model, max_tokens=2, sparse=sparse))
    cache, view = made[0]
    sink = mx.broadcast_to(mx.arange(4, dtype=mx.uint32), (1, 2, 4))
    held, end = cache.held().keys[:, :, :4], len(view)
    turned = view.layer.turn(view.gather(sink).keys, end - 96 + mx.zeros((1, 2, 4), mx.int32))
    assert mx.allclose(held, turned, atol=2e-3).item()


@pytest.mark.parametrize("memory, few", [("recall", 0), ("recall:file", 8192)])
def test_facts_of_a_long_document_are_found_and_nothing_is_far(short, memory, few, monkeypatch):
    """No key that is read, of a chunk or a token, stands farther from its queries than the trained length."""
    exact_up_to(monkeypatch, few)
    turned, lined_up = [], full_view.FullView.lined_up

    def seen(self, places, start, end):
        entries = lined_up(self, places, start, end)
        turned.append((self, places, entries, start, end))
        return entries

    monkeypatch.setattr(full_view.FullView, "lined_up", seen)
    how = "budget=96,n_sink=4,n_window=32,read_top_k=128"
    conversation, right = asked(*short, 3000, sparse=how, memory=memory)
    assert all(right)
    assert conversation.report.pulled_to == LENGTH and conversation.report.read_per_token == 96
    assert f"to the trained length of {LENGTH} tokens" in str(conversation.report)
    assert "no means of the rest beyond the trained length" in str(conversation.report)
    assert conversation.warning() is None
    conversation.policy = resolve_method(sparse="budget=100%,read=dense")
    assert f"more than the model's trained length of {LENGTH}" in conversation.warning()
    far = [each for each in turned if each[3] > 2 * LENGTH]
    assert len(far) > 20
    for view, places, entries, start, end in far[::7]:
        # They are the text's keys, turned to the places before the chunk or token, the newest of them last.
        new = end - places.shape[2] + mx.arange(places.shape[2])
        assert start - LENGTH <= new.min().item() and new.max().item() < start
        moved = view.layer.turn(view.gather(places).keys, new - places.astype(mx.int32))
        assert mx.allclose(moved, entries.keys, atol=2e-3).item()


def test_the_question_is_read_as_the_answer_is(short, monkeypatch):
    """The prompt's latest tokens come a second time, to caches whose entries end before them, a few together."""
    model, tokenizer = short
    made, calls, init = [], [], SparseKVCache.__init__

    def spied(self, ranking, again):
        init(self, ranking, again)
        made.append((len(ranking.view), self))

    monkeypatch.setattr(SparseKVCache, "__init__", spied)
    choice = SparseKVCache.choice
    monkeypatch.setattr(
        SparseKVCache,
        "choice",
        lambda self, captured: (
            calls.append((self, captured.heads.shape[2])) or choice(self, captured)
        ),
    )
    tokens = mx.array(tokenizer.encode(make_haystack(tokenizer, random.Random(3), 4, 3000)[0]))
    steps = list(
        generate_step(tokens, model, max_tokens=3, sparse="budget=96,n_sink=4,n_window=32")
    )
    assert len(steps) == 3
    n, cache = made[0]
    # All but the last token had been read.
    assert n == tokens.size - 1 - (sparse.AGAIN - 1) and len(made) == len(model.layers)
    pieces = [L for who, L in calls if who is cache]
    assert pieces[:8] == [sparse.TOGETHER] * 7 + [7] and set(pieces[8:]) == {1}


@pytest.mark.parametrize("n_last", [1, 2])
def test_a_prompt_s_last_tokens_may_come_by_themselves(short, n_last):
    """After the others have been read without an answer, as one does to decode with mlx-lm."""
    model, tokenizer = short
    document, facts = make_haystack(tokenizer, random.Random(3), 4, 3000)
    for fact in facts[:2]:
        tokens = question_prompt(tokenizer, document, fact.question)
        how = {"sparse": "budget=256,n_sink=4,n_window=32"}
        cache, _ = prefill(model, tokens[:-n_last], **how)
        steps = generate_step(tokens[-n_last:], model, prompt_cache=cache, max_tokens=12, **how)
        assert is_right(fact, tokenizer.decode([token for token, _ in steps]))


def test_a_hybrid_s_linear_layers_read_the_question_once(monkeypatch):
    """Their states are those before the latest tokens when these come a second time."""
    model, tokenizer = short_model("demo-qwen3-next")
    tokens = mx.array(tokenizer.encode(make_haystack(tokenizer, random.Random(3), 4, 1500)[0]))
    config = CompressionConfig(resolve_method(sparse="budget=96,n_sink=4,n_window=32"), "recall")
    request = make_request(model, plan_request(model, config, tokens.size))
    states, choice = [], SparseKVCache.choice

    def chosen(self, captured):
        states.append([mx.array(x) for x in request.caches[0].cache])
        return choice(self, captured)

    monkeypatch.setattr(SparseKVCache, "choice", chosen)
    with request.recording():
        request.model(tokens[None, :-1], request.caches)
        request.model(tokens[None, -1:], request.caches)
    # The first layer's states don't depend on what attention layers read.
    for n_latest, ours in ((sparse.TOGETHER, states[0]), (sparse.AGAIN, states[-1])):
        plain = make_prompt_cache(model)
        model(tokens[None, : tokens.size - sparse.AGAIN + n_latest], cache=plain)
        for found, wanted in zip(ours, plain[0].cache, strict=True):
            assert mx.allclose(found, wanted, atol=1e-3).item()
