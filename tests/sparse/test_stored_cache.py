"""Caches with all entries in a store: they equal plain caches, and need memory for only a few entries or layers."""

import copy
import gc

import mlx.core as mx
import numpy as np
import pytest
from entry_helpers import exact_up_to
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache
from tiny_models import make_llama

from mlx_snapkv.caches.layers import attention_layers
from mlx_snapkv.engine.request import Request
from mlx_snapkv.entries.quantization import Quantization
from mlx_snapkv.entries.queries import CapturedQueries, Queries
from mlx_snapkv.planning.config import CompressionConfig
from mlx_snapkv.planning.request_plan import plan_request
from mlx_snapkv.sparse.full_view import FullView
from mlx_snapkv.sparse.options import Sparse
from mlx_snapkv.sparse.stored_cache import StoredKVCache
from mlx_snapkv.sparse.stores import MemoryStore
from mlx_snapkv.sparse.stores.file import FileStore

STORES = [FileStore, lambda: MemoryStore(Quantization(4, 64))]


def rows_of(n, seed=0, width=64):
    return list(mx.random.normal((2, 1, 2, n, width), key=mx.random.key(seed)))


@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.parametrize("store", STORES)
def test_new_tokens_and_stored_ones_are_undone(store, offloads):
    for n in (0, 3, 8, 13):
        cache = StoredKVCache(store=store())
        cache.update_and_fetch(*rows_of(10))
        cache.offload()
        cache.update_and_fetch(*rows_of(3, 1))
        before, nbytes = [mx.array(x) for x in cache.keys_and_values()], cache.nbytes
        restore = cache.restorer()
        cache.update_and_fetch(*rows_of(300, 2))
        if offloads:
            cache.offload()
        restore()
        assert cache.trim(n) == n
        assert cache.offset == 13 - n and (n or cache.nbytes == nbytes)
        cache.update_and_fetch(*rows_of(4, 3))
        pairs = zip(before, rows_of(4, 3))
        wanted = [mx.concatenate([a[:, :, : 13 - n], b], axis=2) for a, b in pairs]
        assert all(map(mx.array_equal, cache.keys_and_values(), wanted))


N_LAYERS, N_ENTRIES = 6, 20_000
SPARSE = Sparse(budget=64, n_sink=4, n_window=32, read="dense")


@pytest.mark.parametrize("store", STORES)
def test_a_turn_needs_the_memory_of_a_few_layers_only(store):
    """A chunk and a token that chooses are measured. All 6 layers together would need 6 times the memory."""
    model = make_llama(num_hidden_layers=N_LAYERS, hidden_size=256)  # heads of 64
    caches = [StoredKVCache(store=store()) for _ in range(N_LAYERS)]
    for cache in caches:
        cache.update_and_fetch(*rows_of(N_ENTRIES))
        cache.offload()
    mx.clear_cache()
    config = CompressionConfig(SPARSE)
    turn = Request(model, plan_request(model, config, 41, caches), caches, uses_store=True)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    with turn.recording():
        for n in (40, 1):
            mx.eval(model(mx.zeros((1, n), mx.int32), cache=turn.caches))
    report = turn.compress()
    layer = N_ENTRIES * 2 * 2 * 64 * 4
    assert mx.get_peak_memory() - before < 3 * layer
    assert len(report.entries_kept) == N_LAYERS and max(report.entries_kept) <= 64
    assert report.kv_bytes_before == N_LAYERS * 2 * 2 * 64 * 4 * (N_ENTRIES + 41)
    assert all(c.growing.empty() and c.offset == N_ENTRIES + 41 for c in caches)


def test_recorded_queries_do_not_keep_their_chunk_alive():
    cache = StoredKVCache()
    cache.observe(2048 - 32, 2048, 2048)
    cache.update_and_fetch(*mx.zeros((2, 1, 1, 2048, 8)))
    queries = mx.random.normal((1, 4, 2048, 64))
    mx.eval(queries, cache.state)
    chunk, before = queries.nbytes, mx.get_active_memory()
    cache.record(CapturedQueries(queries, 1.0))
    mx.eval(cache.state)
    del queries
    gc.collect()
    assert mx.get_active_memory() < before - 0.9 * chunk


def feed(cache, rows, chunks):
    start = 0
    for n in chunks:
        cache.append(*(x[:, :, start : start + n] for x in rows))
        start += n
    return start


def assert_stored(cache, rows):
    (view,) = cache.nonempty_stores()
    assert view.n_entries == cache.offset
    for found, wanted in zip(view.entries(), rows):
        assert mx.array_equal(found, wanted[:, :, : cache.offset])


CHUNKS = st.lists(st.integers(1, 8), min_size=1, max_size=12)


@given(CHUNKS, CHUNKS, st.booleans(), st.booleans())
def test_chunks_moved_to_the_store_one_by_one_keep_all_entries(before, since, goes_back, in_file):
    """Undone tokens must not change them either."""
    rows, others = rows_of(sum(before) + sum(since)), rows_of(sum(since), seed=1)
    cache = StoredKVCache(store=(FileStore if in_file else MemoryStore)())
    n = feed(cache, rows, before)
    if goes_back:
        restore = cache.restorer()
        feed(cache, others, since)
        restore()
        assert cache.offset == n
    feed(cache, [x[:, :, n:] for x in rows], since)
    assert cache.growing.offset == (since[-1] if in_file else sum(before + since))
    for found, wanted in zip(cache.keys_and_values(), rows):
        assert mx.array_equal(found, wanted)
    cache.offload()
    assert_stored(cache, rows)


def test_the_index_is_rebuilt_when_the_keys_have_doubled(monkeypatch):
    """Late keys differ from early keys in other directions. An index built for early keys could not tell them apart."""
    exact_up_to(monkeypatch, 50)
    few, values = rows_of(800, width=16)
    # Keys vary in three directions, fewer than an index holds, and late keys are shifted in another.
    keys = (
        few[..., :3] @ mx.random.normal((3, 16), key=mx.random.key(1))
        + 6 * mx.arange(800)[:, None] / 800
    )
    model = make_llama(num_hidden_layers=1, num_key_value_heads=2, head_dim=16)
    (layer,) = attention_layers(model, make_prompt_cache(model))
    cache, n_before = StoredKVCache(layer, FileStore()), 0
    for n in (48, 300, 400, 800):
        feed(cache, (keys[:, :, n_before:], values[:, :, n_before:]), [n - n_before])
        cache.offload()
        cache.index, n_before = (
            FullView(cache.nonempty_stores(), layer).extend_index(cache.index, None),
            n,
        )
        assert (cache.index is None) == (n == 48)
    assert len(cache.index) == 800 and 2 * cache.index.n_keys_at_sampling > 800
    queries = mx.random.normal((1, 2, 1, 16), key=mx.random.key(2))
    found = cache.index.relevance(Queries(queries, range(800, 801), 1.0), 800)[..., 700:]
    wanted = (queries @ keys[:, :, 700:].swapaxes(-1, -2))[:, :, 0]
    for head in range(2):
        assert np.corrcoef(np.array(found[0, head]), np.array(wanted[0, head]))[0, 1] > 0.9


def test_an_index_that_grows_with_a_cache_equals_one_made_at_once(monkeypatch):
    """Trimming the cache removes keys from the index, and restoring the cache restores the index."""
    exact_up_to(monkeypatch, 50)
    model = make_llama(num_hidden_layers=1, num_key_value_heads=2, head_dim=64)
    (layer,) = attention_layers(model, make_prompt_cache(model))
    cache, rows, others = StoredKVCache(layer), rows_of(400), rows_of(90, 1)

    def grown(n):
        feed(cache, [x[:, :, cache.offset :] for x in rows], [n - cache.offset])
        view = FullView(cache.nonempty_stores(), layer)
        cache.index = view.extend_index(cache.index, None)
        return cache.index

    def relevance(index):
        asked = mx.random.normal((1, 2, 1, 64), key=mx.random.key(2))
        return index.relevance(Queries(asked, range(400, 401), 1.0), len(index))

    first = grown(100)
    of_first, codes = relevance(first), copy.deepcopy(first)
    restore = cache.restorer()
    feed(cache, others, [90])
    assert len(FullView(cache.nonempty_stores(), layer).extend_index(cache.index, None)) == 190
    restore()
    assert len(cache.index) == 100 and mx.array_equal(relevance(cache.index), of_first)
    feed(cache, others, [60])
    cache.trim(80)
    second = grown(180)
    assert second.n_keys_at_sampling == 100
    codes.append(rows[0][:, :, 100:180])
    for mine, wanted in zip(second.state[-1], codes.state[-1]):
        assert mx.array_equal(mine, wanted)
    of_old = relevance(second)[..., :100]
    assert mx.allclose(of_old - of_old.max(axis=-1, keepdims=True), of_first, atol=1e-4)
    third = grown(200)
    assert third.n_keys_at_sampling == len(third) == 200 and third is not second


def test_rows_for_the_prompt_are_allocated_at_once_and_later_ones_in_mlx_lms_steps():
    """An answer that reads all entries for long then needs no second buffer as large as the prompt's."""
    cache = StoredKVCache()
    cache.observe(first=900, last=1000, capacity=1017)
    allocated = []
    for n in (400, 600, *[1] * 20):
        cache.update_and_fetch(*rows_of(n))
        allocated.append(cache.growing.keys.shape[2])
    assert allocated[0] == allocated[18] == 1017
    assert allocated[-1] <= 1017 + 256
