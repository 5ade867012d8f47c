import mlx.core as mx
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mlx_snapkv.caches import full_view
from mlx_snapkv.caches.block import BlockKVCache
from mlx_snapkv.caches.file_store import FileStore
from mlx_snapkv.caches.out_of_core import OutOfCoreKVCache
from mlx_snapkv.caches.stores import MemoryStore
from mlx_snapkv.entries.queries import Queries
from mlx_snapkv.policies import TOVA, KeyDiff
from mlx_snapkv.policies.budgets import Quota

POLICY = KeyDiff(budget=24, block=8)
QUOTA = Quota(24, 2, 4)
LIMITS = {"last": 1000, "newest": 0, "expected": 32, "uniform": True, "layer": None}


def rows_of(n, seed=0):
    return list(mx.random.normal((2, 1, 2, n, 16), key=mx.random.key(seed)))


def limited(store):
    cache = OutOfCoreKVCache(store)
    cache.limit(POLICY, QUOTA, **LIMITS)
    return cache


def feed(cache, rows, chunks):
    start = 0
    for n in chunks:
        cache.update_and_fetch(*(x[:, :, start : start + n] for x in rows))
        start += n
    return start


def assert_stored(cache, rows):
    (view,) = cache.views()
    assert view.n_entries == cache.offset
    for found, wanted in zip(view.entries(), rows):
        assert mx.array_equal(found, wanted[:, :, : cache.offset])


CHUNKS = st.lists(st.integers(1, 8), min_size=1, max_size=12)


@given(CHUNKS, CHUNKS, st.booleans(), st.booleans())
def test_what_is_resident_is_a_block_caches_and_nothing_is_lost(before, since, goes_back, in_file):
    """Nor changed by tokens and limits since a mark that were rolled back."""
    rows, others = rows_of(sum(before) + sum(since)), rows_of(sum(since), seed=1)
    mine, block = limited(FileStore() if in_file else MemoryStore()), BlockKVCache(POLICY, QUOTA, 8)
    n = feed(mine, rows, before)
    if goes_back:
        mine.mark()
        mine.limit(POLICY, Quota(20, 1, 3), last=7, newest=3, expected=9, uniform=False, layer=None)
        feed(mine, others, since)
        mine.rollback(sum(since))
        mine.commit()
        assert mine.offset == n
    assert (mine.quota, mine.last, mine.newest, mine.uniform) == (QUOTA, 1000, 0, True)
    feed(mine, [x[:, :, n:] for x in rows], since)
    feed(block, rows, before + since)
    assert mx.array_equal(mine.positions, block.positions)
    for found, wanted in zip(mine.keys_and_values(), block.keys_and_values()):
        assert mx.array_equal(found, wanted)
    assert_stored(mine, rows)


def test_without_a_limit_everything_is_resident():
    cache, rows = OutOfCoreKVCache(MemoryStore()), rows_of(100)
    feed(cache, rows, [40, 1, 59])
    assert cache.n_entries == 100 and cache.store.n_entries == 0 and cache.room == float("inf")
    assert not cache.is_compressed and cache.kv_nbytes == cache.nbytes > 0
    cache.limit(POLICY, QUOTA, **LIMITS)
    more = rows_of(8, seed=1)
    feed(cache, more, [8])
    assert cache.n_entries == 32 and cache.store.n_entries == 100
    assert_stored(cache, [mx.concatenate(pair, axis=2) for pair in zip(rows, more)])
    resident = OutOfCoreKVCache(MemoryStore())
    feed(resident, rows, [100])
    resident.limit(TOVA(block=8), QUOTA, **LIMITS)
    feed(resident, more, [8])
    assert resident.n_entries == 108  # no query has voted yet


def test_the_index_is_made_anew_when_the_keys_have_doubled(monkeypatch):
    """Late keys lie elsewhere than early ones; an index made of those alone would see no difference among them."""
    monkeypatch.setattr(full_view, "FEW", 50)
    few, values = rows_of(800)
    # In fewer directions than an index holds, and along others.
    keys = (
        few[..., :3] @ mx.random.normal((3, 16), key=mx.random.key(1))
        + 6 * mx.arange(800)[:, None] / 800
    )
    cache = limited(MemoryStore())
    feed(cache, (keys, values), [8] * 6)
    cache.offload()
    assert cache.index is None
    feed(cache, (keys[:, :, 48:], values[:, :, 48:]), [8] * 94)
    cache.offload()
    assert len(cache.index) == 800 and 2 * cache.index.n_made_of > 800
    queries = mx.random.normal((1, 2, 1, 16), key=mx.random.key(2))
    found = cache.index.relevance(Queries(queries, range(800, 801), 1.0), 800)[..., 700:]
    wanted = (queries @ keys[:, :, 700:].swapaxes(-1, -2))[:, :, 0]
    for head in range(2):
        assert np.corrcoef(np.array(found[0, head]), np.array(wanted[0, head]))[0, 1] > 0.9
