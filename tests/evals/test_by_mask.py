"""Answers by mask: with equal budgets they are the shipped policy's own."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_snapkv import SnapKVError, stream_generate
from mlx_snapkv.engine import prefill
from mlx_snapkv.evals import by_mask, headwise
from mlx_snapkv.evals.asking import BY_MASK, KEYS, SETTINGS, Way, run
from mlx_snapkv.evals.headwise import AdaKV, FastGen
from mlx_snapkv.evals.results import Results
from mlx_snapkv.evals.suite import Suite
from mlx_snapkv.policies import resolve_policy

GROW = "snapkv:budget=64,n_sink=4,n_window=16,obs_window=16,min_ctx=0,on_full=grow"
FEW = "snapkv:budget=20,n_sink=2,n_window=8,obs_window=8,pool_kernel=1,min_ctx=0,on_full=grow"
GROWING = [
    FEW,
    f"{FEW},lookahead=0",
    FEW.replace("20", "pyramid:20") + ",lookahead=0,critical=true",
]


def answered(make, model, tokenizer, prompt, policy, n=12):
    """Tokens and log-probabilities of an answer."""
    cache = make_prompt_cache(model)
    given = {"policy": policy, "prompt_cache": cache, "on_report": lambda report: None}
    items = [(r.token, np.array(r.logprobs)) for r in make(model, tokenizer, prompt, n, **given)]
    return [token for token, _ in items], [logprobs for _, logprobs in items], cache


@pytest.mark.parametrize("text", GROWING)
def test_equal_budgets_answer_as_the_policy_does(demo_model, ask, text):
    """Every head's best n are safe, so the mask shows what the policy keeps: the same answer."""
    model, tokenizer = demo_model
    prompt, _ = ask(tokenizer, 600, 3)
    policy = resolve_policy(policy=text)
    wanted, logprobs, _ = answered(stream_generate, model, tokenizer, prompt, policy)
    equal = AdaKV(policy, safeguard=1)
    found, ours, cache = answered(by_mask.stream_generate, model, tokenizer, prompt, equal)
    assert found == wanted
    assert max(np.abs(a - b).max() for a, b in zip(logprobs, ours)) < 1e-4
    full = [c for c in cache if isinstance(c, by_mask.MaskedKVCache)]
    assert full and all(c.offset >= len(prompt) for c in full)
    _, seen, _ = answered(stream_generate, model, tokenizer, prompt, None)
    if "lookahead=0" in text:  # else most of the answer has seen everything
        assert max(np.abs(a - b).max() for a, b in zip(seen, ours)) > 0.1


@pytest.mark.parametrize("text", ["kvzip:budget=160,n_sink=2", "keydiff:budget=90,schedule=once"])
def test_equal_budgets_show_what_the_policy_keeps(demo_model, ask, text):
    model, tokenizer = demo_model
    prompt, _ = ask(tokenizer, 600, 3)
    policy = resolve_policy(policy=text)
    shipped, _ = prefill.prefill(model, prompt, policy)
    masked, _ = by_mask.prefill(model, tokenizer, prompt, AdaKV(policy, safeguard=1))
    pairs = [pair for pair in zip(shipped, masked) if isinstance(pair[1], by_mask.MaskedKVCache)]
    assert pairs
    for one, other in pairs:
        for positions, visible in zip(np.array(one.positions)[0], np.array(other.visible)[0]):
            assert np.array_equal(positions, np.flatnonzero(visible))


def test_equal_budgets_answer_questions_that_come_later(demo_model, ask):
    """A chunk of several tokens reads the masked cache; and again, when it was brought back."""
    model, tokenizer = demo_model
    prompt, _ = ask(tokenizer, 600, 4)
    document, question = prompt[:-24], prompt[-24:]
    policy = resolve_policy(policy=GROW)
    cache, _ = prefill.prefill(model, document, policy)
    masked, report = by_mask.prefill(model, tokenizer, document, AdaKV(policy, safeguard=1))
    assert report.entries == 64 and report.kv_bytes_after == report.kv_bytes_before
    wanted = [r.token for r in stream_generate(model, tokenizer, question, 12, prompt_cache=cache)]
    given = {"policy": AdaKV(policy), "prompt_cache": masked, "on_report": lambda report: None}
    answer = by_mask.stream_generate(model, tokenizer, question, 12, **given)
    assert [r.token for r in answer] == wanted


def test_what_shows_everything_answers_as_the_full_cache_does(demo_llama, ask):
    model, tokenizer = demo_llama
    prompt, _ = ask(tokenizer, 400, 5)
    wanted, _, _ = answered(stream_generate, model, tokenizer, prompt, None)
    found, _, _ = answered(by_mask.stream_generate, model, tokenizer, prompt, FastGen(1, 0, 1))
    assert found == wanted
    blind, _, _ = answered(by_mask.stream_generate, model, tokenizer, prompt, FastGen(0))
    assert blind != wanted  # special tokens alone


def test_the_model_is_left_as_it_was(demo_llama, ask):
    from mlx_lm.models import llama

    before = llama.scaled_dot_product_attention
    model, tokenizer = demo_llama
    prompt, _ = ask(tokenizer, 300, 6)
    answered(by_mask.stream_generate, model, tokenizer, prompt, FastGen())
    assert llama.scaled_dot_product_attention is before


def test_tokens_of_a_kind(demo_llama):
    _, tokenizer = demo_llama
    tokens = [0, *tokenizer.encode("It is so. Is it?", add_special_tokens=False), 1]
    kinds = by_mask.kinds_of(tokenizer, tokens)
    assert np.flatnonzero(np.array(kinds.special)).tolist() == [0, len(tokens) - 1]
    marks = [
        tokenizer.decode([tokens[i]]).strip() for i in np.flatnonzero(np.array(kinds.punctuation))
    ]
    assert marks == [".", "?"]


def test_the_suite_asks_by_mask(demo_tasks):
    """In both settings, beside others that are answered together; every record says what was seen and no seconds."""
    model, tokenizer = demo_tasks
    papers = Suite(tokenizer, ["single"], [700], 1, 2)
    policy = resolve_policy(policy=GROW)
    ways = [
        Way("snapkv", policy),
        Way("equal" + BY_MASK, AdaKV(policy, safeguard=1)),
        Way("fastgen" + BY_MASK, headwise.headwise("fastgen:recovery=0.9")),
    ]
    records = run(model, papers, ways, SETTINGS, Results({}, None, KEYS), batch_size=4)
    assert len(records) == 3 * 2 * 2
    by_way = {way.name: [r for r in records if r["way"] == way.name] for way in ways}
    shipped, equal, fastgen = by_way.values()
    assert [r["answer"] for r in equal] == [r["answer"] for r in shipped]
    assert all(r["entries"] == 64 for r in equal)
    assert all(64 < r["entries"] < 700 for r in fastgen)
    assert all(r["first_seconds"] is None and r["kv_bytes"] > 0 for r in equal + fastgen)


def test_what_hides_nothing_is_refused(demo_llama):
    model, tokenizer = demo_llama
    heads = AdaKV(resolve_policy(policy="snapkv:budget=256,n_sink=4,n_window=32,min_ctx=0"))
    with pytest.raises(SnapKVError, match="would hide nothing of 100 tokens"):
        by_mask.prefill(model, tokenizer, [5] * 100, heads)


def test_heads_that_can_not_be_masked_are_refused():
    cache = by_mask.MaskedKVCache(0, 0, 16)
    cache.visible = mx.ones((1, 2, 4), mx.bool_)
    with pytest.raises(SnapKVError, match="repeats their keys"):
        cache.hide(mx.zeros((1, 4, 1, 8)), mx.zeros((1, 4, 5, 8)), None)
