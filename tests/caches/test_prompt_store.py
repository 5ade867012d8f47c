"""mlx-lm's LRUPromptCache with our caches: a fetch is exact or a miss, but never returns wrong entries."""

import copy

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, LRUPromptCache, make_prompt_cache
from request_helpers import assert_same, plain, steps
from saved_helpers import KEYDIFF, SNAPKV, question
from tiny_models import make_llama

from mlx_snapkv import BlockKVCache, SnapKVCache, prefill
from mlx_snapkv.sparse.stored_cache import StoredKVCache

SPARSE = "budget=40,n_sink=4,n_window=16,when=always"
# Options of `prefill`, and the class of its caches. The last two kinds hold all entries.
KINDS = {
    "snapkv": ({"policy": SNAPKV}, SnapKVCache),
    "window": ({"policy": f"{SNAPKV},on_full=slide"}, SnapKVCache),
    "quantised": ({"policy": f"{SNAPKV},on_full=slide"}, SnapKVCache),
    "block": ({"policy": KEYDIFF}, BlockKVCache),
    "sparse": ({"sparse": SPARSE}, KVCache),
    "sparse in files": ({"sparse": f"{SPARSE},store=file"}, StoredKVCache),
}
HOLDING = ("sparse", "sparse in files")


@pytest.fixture
def model():
    return make_llama(head_dim=32)


def read(model, tokens, kind):
    """Return a prompt's tokens, and the caches that have read them."""
    how, cls = KINDS[kind]
    said = tokens.tolist()
    bits = {"kv_bits": 8, "kv_group_size": 32} if kind == "quantised" else {}
    cache, _ = prefill(model, tokens, **how, **bits)
    assert all(type(c) is cls and c.offset == len(said) for c in cache)
    return said, cache


def answer(model, rest, cache, kind):
    """Answer from a cache, with mlx-lm or, if the cache has all entries, with our own request."""
    rest = mx.array(rest)
    if kind not in HOLDING:
        return plain(model, rest, 12, prompt_cache=cache)
    return steps(model, rest, 12, prompt_cache=cache, **KINDS[kind][0])


@pytest.mark.parametrize("kind", KINDS)
def test_an_equal_prompt_and_a_longer_one_are_answered_exactly(model, tokens, kind):
    store, more = LRUPromptCache(), question(30).tolist()
    said, cache = read(model, tokens, kind)
    store.insert_cache("m", said, copy.deepcopy(cache))
    wanted = answer(model, more, cache, kind)
    for asked in ([], more, []):
        found, rest = store.fetch_nearest_cache("m", said + asked)
        assert rest == asked and all(a is not b for a, b in zip(found, cache))
        assert_same(answer(model, more, found, kind), wanted)
    assert len(store) == 1 and store.nbytes == sum(c.nbytes for c in read(model, tokens, kind)[1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 150])
def test_a_branch_or_a_shorter_prompt_is_a_miss_or_exact(model, tokens, kind, n):
    """Caches that have evicted entries are a miss. Caches with all entries are trimmed."""
    store = LRUPromptCache()
    said, cache = read(model, tokens, kind)
    store.insert_cache("m", said, cache)
    for asked in (said[:n], said[:n] + [(token + 1) % 64 for token in said[n:]]):
        found, rest = store.fetch_nearest_cache("m", asked)
        if kind not in HOLDING:
            assert found is None and rest == asked
            continue
        n_read = len(asked) - len(rest)
        assert n_read == min(n, len(asked) - 1) and {c.offset for c in found} == {n_read}
        alone = make_prompt_cache(model)
        wanted = plain(model, mx.array(asked), 12, prompt_cache=alone)
        got = plain(model, mx.array(rest), 12, prompt_cache=found)
        assert [t for t, _ in got] == [t for t, _ in wanted]
        assert all(mx.allclose(a, b, atol=1e-4) for (_, a), (_, b) in zip(got, wanted))
    # The caches in the store are unchanged.
    found, rest = store.fetch_nearest_cache("m", said)
    assert rest == [] and all(c.offset == len(said) for c in found)
    more = question(9).tolist()
    wanted = answer(model, more, read(model, tokens, kind)[1], kind)
    assert_same(answer(model, more, found, kind), wanted)


@pytest.mark.parametrize("kind", ["snapkv", "block"])
def test_a_stored_shorter_prompt_serves_a_branch_of_a_longer_one(model, tokens, kind):
    store, branch = LRUPromptCache(), [63, 62, 61]
    for n in (100, 200):
        said, cache = read(model, tokens[:n], kind)
        store.insert_cache("m", said, cache)
    found, rest = store.fetch_nearest_cache("m", said[:150] + branch)
    assert rest == said[100:150] + branch and {c.offset for c in found} == {100}
    wanted = answer(model, rest, read(model, tokens[:100], kind)[1], kind)
    assert_same(answer(model, rest, found, kind), wanted)
