"""Caches that hold all entries: what is in a store is as in a plain cache, a layer's entries in memory at a time."""

import gc
from dataclasses import replace

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache
from tiny_models import make_llama

from mlx_snapkv.caches.file_store import FileStore
from mlx_snapkv.caches.recording import RecordingKVCache
from mlx_snapkv.caches.stores import MemoryStore
from mlx_snapkv.engine.config import CompressionConfig
from mlx_snapkv.engine.request import make_request
from mlx_snapkv.entries.quantization import Quantization
from mlx_snapkv.entries.queries import Captured
from mlx_snapkv.policies import resolve_policy

STORES = [FileStore, lambda: MemoryStore(Quantization(4, 64))]


def rows_of(n, seed=0):
    mx.random.seed(seed)
    return [mx.random.normal((1, 2, n, 64)) for _ in "kv"]


@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.parametrize("store", STORES)
def test_tokens_since_a_mark_and_stored_ones_are_rolled_back(store, offloads):
    for n in (0, 3, 8, 13):
        cache = RecordingKVCache(0, 0, KVCache.step, store=store())
        cache.update_and_fetch(*rows_of(10))
        cache.offload()
        cache.update_and_fetch(*rows_of(3, 1))
        before, nbytes = [mx.array(x) for x in cache.keys_and_values()], cache.nbytes
        cache.mark()
        cache.update_and_fetch(*rows_of(300, 2))
        if offloads:
            cache.offload()
        cache.rollback(300 + n)
        assert cache.offset == 13 - n and (n or cache.nbytes == nbytes)
        cache.update_and_fetch(*rows_of(4, 3))
        pairs = zip(before, rows_of(4, 3))
        wanted = [mx.concatenate([a[:, :, : 13 - n], b], axis=2) for a, b in pairs]
        assert all(map(mx.array_equal, cache.keys_and_values(), wanted))


N_LAYERS, N_ENTRIES = 6, 20_000
SMALL = resolve_policy(policy="snapkv:budget=64,n_sink=4,n_window=32")


@pytest.mark.parametrize("store", STORES)
def test_a_turn_needs_the_memory_of_a_few_layers_only(store):
    """Of the chunk, of a token before the cut, and of the cut: 6 layers at once would be 6 times as much."""
    model = make_llama(num_hidden_layers=N_LAYERS, hidden_size=256)  # heads of 64
    caches = [RecordingKVCache(0, 0, KVCache.step, store=store()) for _ in range(N_LAYERS)]
    for cache in caches:
        cache.update_and_fetch(*rows_of(N_ENTRIES))
        cache.offload()
    mx.clear_cache()
    config = CompressionConfig(replace(SMALL, lookahead=1), "recall", refresh="turn")
    turn = make_request(model, config, 41, caches, owned=True)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    with turn.recording():
        for n in (40, 1, 1):
            mx.eval(model(mx.zeros((1, n), mx.int32), cache=turn.caches))
    report = turn.compress()
    layer = N_ENTRIES * 2 * 2 * 64 * 4
    assert mx.get_peak_memory() - before < 3 * layer
    assert report.entries_kept == [64] * N_LAYERS
    assert report.kv_bytes_before == N_LAYERS * 2 * 2 * 64 * 4 * (N_ENTRIES + 42)
    assert all(c.growing.empty() and c.offset == N_ENTRIES + 42 for c in caches)


def test_recorded_queries_do_not_keep_their_chunk_alive():
    cache = RecordingKVCache(2048 - 32, 2048, 2048)
    cache.update_and_fetch(*mx.zeros((2, 1, 1, 2048, 8)))
    queries = mx.random.normal((1, 4, 2048, 64))
    mx.eval(queries, cache.state)
    last = queries[:, :, -32:].tolist()
    chunk, before = queries.nbytes, mx.get_active_memory()
    cache.record(Captured(queries, 1.0))
    mx.eval(cache.state)
    del queries
    gc.collect()
    assert mx.get_active_memory() < before - 0.9 * chunk
    assert cache.queries.tolist() == last
