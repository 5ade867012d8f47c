"""All entries of a layer, wherever they are: votes are NumPy's in float64."""

import mlx.core as mx
import numpy as np
import pytest
import reference

from mlx_snapkv.caches.file_store import FileStore
from mlx_snapkv.caches.full_view import FullView
from mlx_snapkv.caches.stores import MemoryStore
from mlx_snapkv.entries import attention
from mlx_snapkv.entries.entries import Entries
from mlx_snapkv.entries.quantization import Quantization
from mlx_snapkv.entries.queries import Queries

B, H, D, T = 1, 2, 64, 321
STORES = {
    "memory": MemoryStore,
    "8 bits": lambda: MemoryStore(Quantization(8, 64)),
    "file": FileStore,
}


@pytest.mark.parametrize("first", STORES)
def test_votes_over_all(first, monkeypatch):
    monkeypatch.setattr(attention, "BLOCK_BYTES", 50_000)
    monkeypatch.setattr(attention, "READ_BYTES", 50_000)
    stores = [STORES[first](), MemoryStore()]
    for store, n in zip(stores, (300, T - 300)):
        store.append(Entries(*mx.random.normal((2, B, H, n, D))))
    keys = mx.concatenate([store.entries()[0] for store in stores], axis=2)
    queries, places = mx.random.normal((B, 2 * H, 3, D)), range(T - 2, T + 1)
    entries = FullView(stores, layer=None).voted_by(Queries(queries, places, 0.125))
    (latest,), every = entries.latest_votes(2), entries.votes
    assert "keys" not in vars(entries)  # they are never all in memory
    for votes, n in ((every, 3), (latest, 2)):
        wanted = reference.votes(queries[:, :, -n:], keys, places[-n:], 0.125)
        np.testing.assert_allclose(np.array(votes), wanted, rtol=1e-5, atol=1e-7)
