"""mlx-lm's store of prompts, which its server keeps, with compressed caches in it."""

import copy

import mlx.core as mx
import pytest
from mlx_lm.models.cache import LRUPromptCache
from request_helpers import assert_same, steps
from saved_helpers import KEYDIFF, SNAPKV, question
from tiny_models import make_llama

from mlx_snapkv import prefill


@pytest.mark.parametrize("policy", [SNAPKV, KEYDIFF])
def test_a_continuation_is_exact_and_a_branch_or_a_shorter_prompt_is_no_one_elses(tokens, policy):
    model, store, prompt = make_llama(), LRUPromptCache(), tokens.tolist()
    cache, report = prefill(model, tokens, policy)
    assert report.compressed

    def answer(rest, cache):
        return steps(model, mx.array(rest), n=24, prompt_cache=cache)

    store.insert_cache("m", prompt, copy.deepcopy(cache))
    more = question(30).tolist()
    for asked in ([], more):
        found, rest = store.fetch_nearest_cache("m", prompt + asked)
        assert rest == asked
        assert_same(answer(more, found), answer(more, copy.deepcopy(cache)))
        store.insert_cache("m", prompt, copy.deepcopy(cache))
    assert store.fetch_nearest_cache("m", prompt[:120]) == (None, prompt[:120])
    branched = prompt[:150] + [(token + 1) % 64 for token in prompt[150:]]
    found, rest = store.fetch_nearest_cache("m", branched)
    n_read = len(branched) - len(rest)
    assert rest and n_read <= 150
    if found is not None:
        alone, _ = prefill(model, mx.array(branched[:n_read]), policy)
        assert_same(answer(rest, found), answer(rest, alone))
