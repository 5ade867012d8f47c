"""All entries of a layer, wherever they are: votes are NumPy's in float64."""

import mlx.core as mx
import numpy as np
import pytest
import reference
from mlx_lm.models.cache import KVCache

from mlx_snapkv.caches.adapter import plain_cache
from mlx_snapkv.caches.file_store import FileStore
from mlx_snapkv.caches.full_view import FullView
from mlx_snapkv.caches.recording import RecordingKVCache
from mlx_snapkv.caches.stores import MemoryStore
from mlx_snapkv.entries import attention
from mlx_snapkv.entries.quantization import Quantization
from mlx_snapkv.entries.queries import Queries

B, H, D, T, SAID = 1, 2, 64, 300, 21


def recording(store=None):
    return RecordingKVCache(0, 0, KVCache.step, store=store)


SOURCES = {
    "memory": recording,
    "8 bits": lambda: recording(MemoryStore(Quantization(8, 64))),
    "file": lambda: recording(FileStore()),
    "file, and newer ones in memory": lambda: recording(FileStore()),
}


def viewed(kind):
    """A view of `T` entries and an answer, and all of them, as they are read."""
    mx.random.seed(1)
    rows = [mx.random.normal((B, H, T + SAID, D)) for _ in range(2)]
    cache = SOURCES[kind]()
    for a, b in ((0, 100), (100, T)):
        cache.update_and_fetch(*(x[:, :, a:b] for x in rows))
        if "newer" not in kind or b < T:
            cache.offload()
    held = cache.held()
    answer = [x[:, :, T:] for x in rows]
    found = FullView([*cache.views(), MemoryStore(cache=plain_cache(*answer))], layer=None)
    return found, [mx.concatenate([x, y], axis=2) for x, y in zip((held.keys, held.values), answer)]


@pytest.mark.parametrize("kind", SOURCES)
def test_votes_over_all(kind, monkeypatch):
    monkeypatch.setattr(attention, "BLOCK_BYTES", 50_000)
    monkeypatch.setattr(attention, "READ_BYTES", 50_000)
    found, (keys, _) = viewed(kind)
    queries = mx.random.normal((B, 2 * H, 3, D))
    places = range(T + SAID - 2, T + SAID + 1)
    entries = found.voted_by(Queries(queries, places, 0.125))
    (latest,), every = entries.latest_votes(2), entries.votes
    assert "keys" not in vars(entries)  # they are never all in memory
    for votes, n in ((every, 3), (latest, 2)):
        wanted = reference.votes(queries[:, :, -n:], keys, places[-n:], 0.125)
        np.testing.assert_allclose(np.array(votes), wanted, rtol=1e-5, atol=1e-7)
