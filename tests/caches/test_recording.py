"""What recorded queries hold in memory."""

import gc

import mlx.core as mx

from mlx_snapkv.caches.recording import RecordingKVCache


def test_recorded_queries_do_not_keep_their_chunk_alive():
    cache = RecordingKVCache(2048 - 32, 2048, 2048)
    rows = mx.zeros((1, 1, 2048, 8))
    cache.update_and_fetch(rows, rows)
    queries = mx.random.normal((1, 4, 2048, 64))
    mx.eval(queries, cache.state)
    last = queries[:, :, -32:].tolist()
    chunk, before = queries.nbytes, mx.get_active_memory()
    cache.record(queries, 1.0)
    mx.eval(cache.state)
    del queries
    gc.collect()
    assert mx.get_active_memory() < before - 0.9 * chunk
    assert cache.queries.tolist() == last
