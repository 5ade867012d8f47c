"""mlx-lm's store of prompts, which its server keeps, with compressed caches in it."""

import copy

import mlx.core as mx
import pytest
from mlx_lm.models.cache import LRUPromptCache
from request_helpers import assert_same, steps
from saved_helpers import KEYDIFF, SNAPKV, question
from tiny_models import make_llama

from mlx_snapkv import prefill

POLICIES = [
    SNAPKV,
    KEYDIFF,
    f"{KEYDIFF} then snapkv:budget=24,n_sink=2,n_window=8,obs_window=8,lookahead=4",
]


@pytest.fixture(params=POLICIES)
def stored(request, tokens):
    """A model, its prompt, the prompt's cache, a store that holds it, and the policy."""
    model, store = make_llama(), LRUPromptCache()
    cache, report = prefill(model, tokens, request.param)
    assert report.compressed
    store.insert_cache("m", tokens.tolist(), copy.deepcopy(cache))
    return model, tokens.tolist(), cache, store, request.param


def answer(model, rest, cache):
    return steps(model, mx.array(rest), n=24, prompt_cache=cache)


def test_the_same_prompt_goes_on_as_the_original(stored):
    model, prompt, cache, store, _ = stored
    found, rest = store.fetch_nearest_cache("m", prompt)
    assert rest == []
    asked = question()
    assert_same(answer(model, asked, found), answer(model, asked, cache))


def test_of_a_continuation_the_rest_is_left_to_read(stored):
    model, prompt, cache, store, _ = stored
    more = question(30).tolist()
    found, rest = store.fetch_nearest_cache("m", prompt + more)
    assert rest == more
    assert_same(answer(model, rest, found), answer(model, more, cache))


def test_a_prompt_that_branches_off_never_gets_entries_of_another(stored):
    model, prompt, _, store, policy = stored
    branched = prompt[:150] + [(token + 1) % 64 for token in prompt[150:]]
    found, rest = store.fetch_nearest_cache("m", branched)
    if found is None:
        assert rest == branched
        return
    n_read = len(branched) - len(rest)
    assert rest and n_read <= 150
    alone, _ = prefill(model, mx.array(branched[:n_read]), policy)
    assert_same(answer(model, rest, found), answer(model, rest, alone))


def test_a_shorter_prompt_is_a_miss(stored):
    _, prompt, _, store, _ = stored
    assert store.fetch_nearest_cache("m", prompt[:120]) == (None, prompt[:120])
