"""Answers by mask: with equal budgets they are the shipped policy's own."""

import numpy as np
import pytest

from mlx_snapkv import SnapKVError, stream_generate
from mlx_snapkv.engine.request import held_tokens
from mlx_snapkv.evals.headwise import AdaKV, FastGen, MaskedKVCache, kinds_of, masked
from mlx_snapkv.evals.reading import read_once
from mlx_snapkv.policies import resolve_policy

GROW = "snapkv:budget=64,n_sink=4,n_window=16,obs_window=16,on_full=grow"
FEW = "snapkv:budget=20,n_sink=2,n_window=8,obs_window=8,pool_kernel=1,on_full=grow"
GROWING = [FEW, FEW.replace("20", "pyramid:20") + ",lookahead=0,critical=true"]


def shown(model, tokenizer, prompt, heads, answering=False):
    """The reading of a prompt, the masked cache and its report."""
    reading = read_once(model, prompt, [heads.scores])
    return reading, *masked(reading, heads, kinds_of(tokenizer, prompt), answering)


def decoded(model, tokenizer, tokens, n, **options):
    """Tokens and log-probabilities of an answer."""
    items = stream_generate(model, tokenizer, tokens, n, **options)
    return zip(*((r.token, np.array(r.logprobs)) for r in items))


def answered(model, tokenizer, prompt, heads, n=12):
    """The answer by mask; log-probabilities from the first token that the mask has served."""
    reading, cache, _ = shown(model, tokenizer, prompt, heads, answering=True)
    stops = tokenizer.eos_token_ids
    first = reading.answer(held_tokens(model, cache) - len(prompt) + 1, stops)
    if first[-1] in stops:
        return first, [], cache
    tokens, logprobs = decoded(model, tokenizer, first[-1:], n - len(first), prompt_cache=cache)
    return [*first, *tokens], logprobs, cache


@pytest.mark.parametrize("text", GROWING)
def test_equal_budgets_answer_as_the_policy_does(demo_model, ask, text):
    """Every head's best n are safe, so the mask shows what the policy keeps: the same answer."""
    model, tokenizer = demo_model
    prompt, _ = ask(tokenizer, 600, 3)
    policy = resolve_policy(policy=text)
    wanted, logprobs = decoded(model, tokenizer, prompt, 12, policy=policy)
    found, ours, cache = answered(model, tokenizer, prompt, AdaKV(policy=policy, safeguard=1))
    assert found == list(wanted)
    n = len(ours)
    assert all(np.abs(a - b).max() < 1e-4 for a, b in zip(logprobs[len(found) - n :], ours))
    full = [c for c in cache if isinstance(c, MaskedKVCache)]
    assert full and all(c.offset >= len(prompt) for c in full)
    _, seen = decoded(model, tokenizer, prompt, 12)
    if "lookahead=0" in text:  # else most of the answer has seen everything
        assert max(np.abs(a - b).max() for a, b in zip(seen[len(found) - n :], ours)) > 0.1


def test_what_shows_everything_answers_as_the_full_cache_does(demo_llama, ask):
    model, tokenizer = demo_llama
    prompt, _ = ask(tokenizer, 400, 5)
    wanted, _ = decoded(model, tokenizer, prompt, 12)
    found, *_ = answered(model, tokenizer, prompt, FastGen(recovery=1, frequent=0, local=1))
    assert found == list(wanted)
    blind, *_ = answered(model, tokenizer, prompt, FastGen(recovery=0))
    assert blind != found  # special tokens alone


def test_what_can_not_be_masked_is_refused(demo_llama):
    heads = AdaKV(policy=resolve_policy(policy=GROW))
    with pytest.raises(SnapKVError, match="would hide nothing of 50 tokens"):
        shown(*demo_llama, [5] * 50, heads)


def test_tokens_of_a_kind(demo_llama):
    _, tokenizer = demo_llama
    tokens = [0, *tokenizer.encode("It is so. Is it?", add_special_tokens=False), 1]
    special, punctuation = kinds_of(tokenizer, tokens)
    assert np.flatnonzero(np.array(special)).tolist() == [0, len(tokens) - 1]
    marks = [tokenizer.decode([tokens[i]]).strip() for i in np.flatnonzero(np.array(punctuation))]
    assert marks == [".", "?"]
