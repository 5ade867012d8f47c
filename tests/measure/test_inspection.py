"""`inspect_prompt` reports which entries were kept, and the attention weights of all entries."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_snapkv import SnapKVError, inspect_prompt, prefill
from mlx_snapkv.caches.layers import attention_layers
from mlx_snapkv.compress.recording import RecordingKVCache
from mlx_snapkv.models import attention_classes
from mlx_snapkv.models.patch import recording

SMALL = "n_sink=4,n_window=32,obs_window=32,pool=avg,pool_kernel=21"


@pytest.fixture(scope="module")
def asked(demo_llama, ask):
    return ask(demo_llama[1], 1000, 5)


def test_the_fact_asked_for_is_among_the_most_kept_sentences(demo_model, ask):
    model, tokenizer = demo_model
    tokens, fact = ask(tokenizer, 1500, 1)
    budget = len(tokens) // 16
    policies = f"snapkv:budget={budget},{SMALL},lookahead=4", f"streaming_llm:budget={budget}"
    told = [inspect_prompt(model, tokenizer, tokens, 12, policy=policy) for policy in policies]
    for found, is_kept in zip(told, (True, False)):
        assert found.positions.shape == (len(found.layers), 2, budget)
        assert any(fact.value in s.text for s in found.sentences[:10]) == is_kept
    ours, streaming = told
    assert ours.answer.strip() == fact.value
    # Votes are shares of the chosen entries. StreamingLLM keeps only sink and window, so it chooses none.
    votes = [s.votes for s in ours.sentences]
    assert votes == sorted(votes, reverse=True) and 0.9 < sum(votes) <= 1.001
    assert {s.chosen or 0 for s in streaming.sentences} == {0}


@pytest.mark.parametrize(
    "policy",
    [
        f"snapkv:budget=100,{SMALL},lookahead=0,on_full=grow",
        "keydiff:budget=200,block=100 then snapkv:budget=96,n_sink=4,n_window=32,on_full=grow,lookahead=0",
        "tova:budget=100,schedule=once",
    ],
)
def test_the_positions_are_the_ones_that_prefill_keeps(demo_llama, asked, policy):
    model, tokenizer = demo_llama
    tokens, _ = asked
    found = inspect_prompt(model, tokenizer, tokens, 3, policy=policy)
    caches, report = prefill(model, tokens, policy)
    assert found.report.entries_kept == report.entries_kept
    assert found.shares == pytest.approx(report.attention_share, rel=1e-4)
    for layer, rows in zip(attention_layers(model, caches), found.positions):
        kept = np.sort(np.array(layer.cache_in(caches).positions[0]), axis=-1)
        assert (rows[:, : kept.shape[1]] == kept).all() and (rows[:, kept.shape[1] :] == -1).all()
    assert found.kept.sum() == (found.positions >= 0).sum()
    assert found.density(50).shape == (3, 50) and 0 < found.density(50).max() <= 1


def test_the_weights_are_the_attentions_own(demo_qwen, ask):
    """NumPy computes them from the attention's own queries, for the last token of a prompt below min_ctx."""
    model, tokenizer = demo_qwen
    tokens, _ = ask(tokenizer, 300, 7)
    found = inspect_prompt(model, tokenizer, tokens, 4, policy="snapkv:top_k=10,min_ctx=1000")
    assert "min_ctx" in found.report.reason
    n = len(tokens)
    assert found.layers == (1, 3) and found.layers_without == (0, 2) and found.heads == (2, 2)
    assert found.positions.shape == (2, 2, n) and found.kept.all()
    assert found.shares == [None, None] and found.sentences == ()
    assert found.attended.n_before == len(found.answer_tokens)
    caches = make_prompt_cache(model)
    layers = attention_layers(model, caches)
    for layer in layers:
        layer.put(caches, RecordingKVCache(n - 1, n, n, layer))
    with recording(attention_classes(model)):
        mx.eval(model(mx.array([tokens]), cache=caches))
    means = []
    for number, layer in enumerate(layers):
        cache = layer.cache_in(caches)
        queries = np.array(cache.queries[0, :, -1], np.float64)
        keys = np.repeat(np.array(cache.held().keys[0], np.float64), len(queries) // 2, axis=0)
        logits = np.einsum("hd,htd->ht", queries, keys) * cache.scale
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        means.append((weights / weights.sum(axis=1, keepdims=True)).mean(axis=0))
        _require_largest(found.attended, number, means[-1])
    _require_largest(found.attended, len(layers), np.mean(means, axis=0))
    assert found.attended.own[0] == pytest.approx(0, abs=1e-6)
    assert (found.attended.own[1:] > 0).all()


def _require_largest(attended, row, weights):
    told, places = attended.weights[0, row], attended.positions[0, row]
    assert told == pytest.approx(np.sort(weights)[::-1][: len(told)], rel=1e-3, abs=1e-6)
    assert weights[places] == pytest.approx(told, rel=1e-3, abs=1e-6)


def test_the_answer_attends_to_the_text_that_it_repeats(demo_llama, asked):
    model, tokenizer = demo_llama
    tokens, fact = asked
    found = inspect_prompt(model, tokenizer, tokens, 12, policy=f"snapkv:budget=80,{SMALL}")
    assert "".join(found.answer_tokens).strip() == fact.value == found.answer.strip()
    clause = fact.clause[1:]  # its first letter may be a capital in the document
    at = found.text.index(clause)
    said = range(at, at + len(clause))
    looked = found.attended
    assert looked.n_before == 2 < len(found.answer_tokens)
    for i, text in enumerate(found.answer_tokens):
        places = looked.positions[i, :, :8]
        assert any(found.spans[p][0] in said for p in places[places >= 0]), text
    # After the compression, tokens attend only to entries that a head keeps.
    late = looked.positions[looked.n_before :, -1]
    assert found.kept.any(axis=(0, 1))[late[late >= 0]].all()


@pytest.mark.parametrize("prompt, n, told", [([], 1, "is empty"), ([1, 2], 0, "max_tokens")])
def test_an_empty_prompt_and_an_empty_answer_are_refused(demo_llama, prompt, n, told):
    with pytest.raises(SnapKVError, match=told):
        inspect_prompt(*demo_llama, prompt, n, policy="streaming_llm:budget=8")
