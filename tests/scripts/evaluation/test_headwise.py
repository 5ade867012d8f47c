"""What heads of their own budgets keep, by hand and against float64 NumPy, and what they answer by mask."""

import mlx.core as mx
import numpy as np
import pytest
from evaluation.headwise import (
    AdaKV,
    FastGen,
    MaskedKVCache,
    best_of_all_heads,
    headwise,
    kinds_of,
    masked,
)

from mlx_snapkv import SnapKVError, stream_generate
from mlx_snapkv.caches.layers import held_tokens
from mlx_snapkv.entries.entries import Entries
from mlx_snapkv.entries.queries import Queries
from mlx_snapkv.measure.decoding import decode
from mlx_snapkv.measure.reading import read_once
from mlx_snapkv.policies import resolve_policy
from mlx_snapkv.policies.budgets import Quota


def adakv_reference(scores, quota, safeguard):
    """The sets of a layer's heads, an entry at a time."""
    H, T = scores.shape
    n = min(quota.entries, T)

    def rank(place):
        head, t = place
        return (quota.n_sink <= t < T - quota.n_window, -scores[head, t], head, t)

    ranked = sorted(np.ndindex(H, T), key=rank)
    safe = {x for h in range(H) for x in [x for x in ranked if x[0] == h][: int(safeguard * n)]}
    chosen = safe | {*[x for x in ranked if x not in safe][: H * n - len(safe)]}
    return [sorted(t for h, t in chosen if h == head) for head in range(H)]


@pytest.mark.parametrize("safeguard", [0, 0.5, 1])
@pytest.mark.parametrize("quota", [Quota(12, 2, 5), Quota(99, 4, 4)])
def test_adakv(quota, safeguard):
    rng = np.random.default_rng(0)
    scores = np.round(rng.random((4, 40)) * np.array([[1], [2], [0.2], [1]]), 2)  # with ties
    scores = scores.astype(np.float32)
    found = np.array(best_of_all_heads(mx.array(scores)[None], quota, safeguard)[0])
    kept = [np.flatnonzero(head).tolist() for head in found]
    assert kept == adakv_reference(scores, quota, safeguard)


def fastgen_reference(keys, queries, special, marks, method):
    """The policy of each head, and what it keeps, by its whole attention map in float64."""
    (H, T, D), found = keys.shape, []
    causal = np.tri(T, dtype=bool)
    for head, own in enumerate(queries.reshape(H, -1, T, D).astype(np.float64)):
        logits = np.where(causal, own @ keys[head].T.astype(np.float64) / np.sqrt(D), -np.inf)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights = (weights / weights.sum(-1, keepdims=True)).mean(axis=0)
        frequent = np.zeros(T, bool)
        frequent[np.argsort(-weights.sum(axis=0))[: int(method.frequent * T)]] = True
        n_local = int(method.local * T)
        band = causal & ~np.tri(T, k=-n_local, dtype=bool)
        columns = [special, special | marks, special | marks | frequent]
        seen = [*columns, columns[-1] | band, np.ones((T, T), bool)]
        kept = [*columns, columns[-1] | (np.arange(T) >= T - n_local), np.ones(T, bool)]
        shares = [(weights * mask).sum() / T for mask in seen]
        chosen = next(i for i, share in enumerate(shares) if share >= method.recovery - 1e-9)
        found.append((chosen, kept[chosen]))
    return found


def test_fastgen():
    """Every policy is some head's at some threshold, and each keeps what the reference says."""
    chosen = set()
    for seed in range(4):
        rng = np.random.default_rng(seed)
        keys, queries = rng.standard_normal((1, 3, 24, 8)), 3 * rng.standard_normal((1, 6, 24, 8))
        queries[:, :2] = 0  # the first KV head's see everything alike
        own = mx.array(keys.astype(np.float32)), mx.array(queries.astype(np.float32))
        layer = Entries(own[0], own[0], Queries(own[1], range(24), 8**-0.5))
        special, marks = np.arange(24) < 2, np.arange(24) % 6 == 5
        for recovery in (0.2, 0.4, 0.55, 0.7, 0.8, 0.9, 0.97):
            method = FastGen(recovery=recovery)
            wanted = fastgen_reference(keys[0], queries[0], special, marks, method)
            kinds = mx.array(special), mx.array(marks)
            found = np.array(method.visible(layer, Quota(1, 0, 1), kinds))[0]
            for own, (policy, columns) in zip(found, wanted):
                chosen.add(policy)
                assert np.array_equal(own, columns)
    assert chosen == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("kind", [None, "causal", "added"])
def test_hidden_entries_are_masked(kind):
    """For the query heads of their KV head; tokens after the prompt are seen."""
    visible = np.random.default_rng(1).random((2, 9)) < 0.4
    cache = MaskedKVCache(0, 0, 16)
    cache.visible = mx.array(visible)[None]
    causal = np.tri(3, 12, k=9, dtype=bool)
    given = mx.where(mx.array(causal), 0.0, -mx.inf) if kind == "added" else kind
    found = np.array(cache.hide(mx.zeros((1, 4, 3, 8)), mx.zeros((1, 2, 12, 8)), given)[0])
    seen = np.concatenate([visible, np.ones((2, 3), bool)], axis=1).repeat(2, axis=0)[:, None]
    assert ((found == 0 if kind == "added" else found) == (seen & causal if kind else seen)).all()


def test_names_and_mistakes():
    text = "adakv:safeguard=0.5 of snapkv:budget=9%"
    assert str(headwise(text)) == text
    for text, words in {
        "adakv:alpha=1 of snapkv": "unknown adakv option 'alpha'; known: safeguard",
        "adakv:safeguard=2 of snapkv": "safeguard must be 0 to 1, got 2",
        "fastgen:recovery=much": "recovery must be 0 to 1, got 'much'",
        "adakv of h2o:schedule=once": "chooses from full caches",
        "adakv of keydiff:budget=8000 then snapkv": "needs one policy",
    }.items():
        with pytest.raises(SnapKVError, match=words):
            headwise(text)


def answered(model, tokenizer, prompt, heads, n=12):
    reading = read_once(model, prompt, [heads.scores])
    kept = masked(reading, heads, tokenizer, answering=True)
    n_fed = held_tokens(model, kept[0]) - len(prompt)
    begun = reading.answer(n_fed + 1, tokenizer.eos_token_ids)
    return decode(model, tokenizer, prompt, begun, kept, n).tokens


def decoded(model, tokenizer, tokens, n, **options):
    return [r.token for r in stream_generate(model, tokenizer, tokens, n, **options)]


FEW = "snapkv:budget=20,n_sink=2,n_window=8,obs_window=8,pool_kernel=1,on_full=grow"


@pytest.mark.parametrize("text", [FEW, f"{FEW},lookahead=0"])
def test_equal_budgets_answer_as_the_policy_does(demo_model, ask, text):
    """Every head's best n are safe, so the mask shows what the policy keeps: the same answer."""
    model, tokenizer = demo_model
    prompt, _ = ask(tokenizer, 600, 3)
    policy = resolve_policy(policy=text)
    found = answered(model, tokenizer, prompt, AdaKV(policy=policy, safeguard=1))
    assert found == decoded(model, tokenizer, prompt, 12, policy=policy)
    if "lookahead=0" in text:  # else most of the answer has seen everything
        assert found != decoded(model, tokenizer, prompt, 12)


def test_what_shows_everything_answers_as_the_full_cache_does(demo_llama, ask):
    prompt, _ = ask(demo_llama[1], 400, 5)
    found = answered(*demo_llama, prompt, FastGen(recovery=1, frequent=0, local=1))
    assert found == decoded(*demo_llama, prompt, 12)
    assert answered(*demo_llama, prompt, FastGen(recovery=0)) != found  # special tokens alone
    with pytest.raises(SnapKVError, match="would hide none of 19 tokens"):
        answered(*demo_llama, [5] * 19, AdaKV(policy=resolve_policy(policy=FEW)))


def test_tokens_of_a_kind(demo_llama):
    _, tokenizer = demo_llama
    tokens = [0, *tokenizer.encode("It is so. Is it?", add_special_tokens=False), 1]
    special, punctuation = kinds_of(tokenizer, tokens)
    assert np.flatnonzero(np.array(special)).tolist() == [0, len(tokens) - 1]
    marks = [tokenizer.decode([tokens[i]]).strip() for i in np.flatnonzero(np.array(punctuation))]
    assert marks == [".", "?"]
