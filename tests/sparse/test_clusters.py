"""Clusters of entries with similar keys: against NumPy, block by block, and as a text grows."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from tiny_models import make_llama

from mlx_snapkv.caches.layers import attention_layers
from mlx_snapkv.entries.entries import Entries
from mlx_snapkv.entries.spans import BLOCK_SIZE
from mlx_snapkv.sparse.clusters import CLUSTER_SIZE, Clusters, cluster_entries
from mlx_snapkv.sparse.full_view import FullView
from mlx_snapkv.sparse.stores import FileStore

H, D = 2, 32


def normal(*shape, seed=0):
    return mx.random.normal(shape, key=mx.random.key(seed))


def means_by_numpy(entries, of, n):
    """Return the cluster means `(H, n, D)` in float64. Clusters without entries have NaN."""
    entries, of = np.array(entries[0], np.float64), np.array(of[0])
    members = of[:, None] == np.arange(n)[:, None]
    with np.errstate(invalid="ignore"):
        return (members @ entries) / members.sum(axis=-1, keepdims=True)


def test_means_equal_the_means_of_the_clusters_entries():
    keys, values = normal(1, H, BLOCK_SIZE + 1000, D), normal(1, H, BLOCK_SIZE + 1000, D, seed=1)
    found = cluster_entries(Entries(keys, values))
    assert found.n_clusters == BLOCK_SIZE // CLUSTER_SIZE + 4 and found.ids.dtype == mx.uint16
    for means, entries in ((found.keys, keys), (found.values, values)):
        wanted = means_by_numpy(entries, found.ids, found.n_clusters)
        known = ~np.isnan(wanted)
        assert known.mean() > 0.99
        assert np.allclose(np.array(means[0])[known], wanted[known], atol=1e-5)
    of = np.array(found.ids[0])
    # A cluster has entries of one block only.
    assert of[:, :BLOCK_SIZE].max() < BLOCK_SIZE // CLUSTER_SIZE <= of[:, BLOCK_SIZE:].min()


def test_similar_keys_are_in_one_cluster_wherever_they_are():
    """Keys of four directions alternate. Each cluster must contain keys of one direction only."""
    n, kinds = 4 * CLUSTER_SIZE, mx.arange(4 * CLUSTER_SIZE) * 7 % 4
    keys = 10 * mx.eye(D)[kinds][None, None] + 0.1 * normal(1, 1, n, D)
    found = cluster_entries(Entries(keys, keys))
    of = np.array(found.ids[0, 0])
    assert all(len(set(np.array(kinds)[of == i])) == 1 for i in set(of.tolist()))


@pytest.mark.parametrize("n", [1, 255, 257, 1000])
def test_a_text_may_be_shorter_than_a_cluster_or_a_little_longer(n):
    keys = normal(1, H, n, D)
    found = cluster_entries(Entries(keys, keys))
    assert found.n_clusters == -(-n // CLUSTER_SIZE)
    assert np.array(found.ids).max() < found.n_clusters


def test_clusters_grow_with_the_text():
    """The clusters of complete blocks stay the same, and later entries are clustered again."""
    n = 2 * BLOCK_SIZE + 700
    entries = Entries(normal(1, H, n, D), normal(1, H, n, D, seed=1))
    every = cluster_entries(entries)
    assert (
        cluster_entries(Entries(*(x[:, :, :1000] for x in entries.dequantized()))).complete_blocks()
        is None
    )
    held = every.complete_blocks()
    assert held.n_entries == 2 * BLOCK_SIZE and held.ids.dtype == mx.uint8
    first = cluster_entries(Entries(*(x[:, :, : 2 * BLOCK_SIZE] for x in entries.dequantized())))
    assert equal(held.to_clusters(), first)
    assert equal(held.to_clusters().followed_by(cluster_entries(entries, 2 * BLOCK_SIZE)), every)
    shorter = held.within_first(BLOCK_SIZE + 5)
    assert shorter.n_entries == BLOCK_SIZE and equal(
        shorter.to_clusters().followed_by(cluster_entries(entries, BLOCK_SIZE)), every
    )
    assert held.within_first(2 * BLOCK_SIZE) is held and held.within_first(BLOCK_SIZE - 1) is None
    whole = shorter.to_clusters()
    mx.eval(whole)
    assert all(memoryview(x).c_contiguous for x in whole)


def equal(one: Clusters, other: Clusters) -> bool:
    pairs = (one.ids, other.ids), (one.keys, other.keys), (one.values, other.values)
    return all(mx.array_equal(*pair) for pair in pairs)


def test_places_are_counted_by_cluster():
    keys = normal(2, H, 1500, D)
    found = cluster_entries(Entries(keys, keys))
    flags = normal(2, H, 3, 1500, seed=5) > 0.8
    flags[:, :, 0] = False
    counts = np.array(found.sizes_where(flags)).reshape(-1, 3, found.n_clusters)
    heads = np.array(flags).reshape(-1, 3, 1500), np.array(found.ids).reshape(-1, 1500)
    for own, several, ids in zip(counts, *heads, strict=True):
        wanted = [np.bincount(ids[some], minlength=found.n_clusters) for some in several]
        assert np.array_equal(own, wanted)
    positions = mx.argsort(normal(2, H, 1500, seed=7), axis=-1)[..., :90]
    some = mx.put_along_axis(mx.zeros((2, H, 1500), mx.bool_), positions, mx.array(True), axis=-1)
    assert mx.array_equal(found.sizes(positions), found.sizes_where(some[:, :, None])[:, :, 0])
    between = mx.broadcast_to((mx.arange(1500) >= 7) & (mx.arange(1500) < 1003), some.shape)
    wanted = found.sizes_where(between[:, :, None])[:, :, 0]
    assert mx.array_equal(found.sizes_between(7, 1003), wanted)


def test_means_of_half_precision_are_summed_in_float32():
    entries = (300 + 100 * normal(1, 1, CLUSTER_SIZE + 200, 8)).astype(mx.float16)
    found = cluster_entries(Entries(entries, entries))
    assert found.keys.dtype == mx.float16
    wanted = means_by_numpy(entries, found.ids, found.n_clusters)
    assert np.allclose(np.array(found.keys[0], np.float64), wanted, rtol=1e-3)


def test_clustering_entries_in_a_file_holds_one_block_at_a_time():
    store = FileStore()
    entries = Entries(*normal(2, 1, H, 8 * BLOCK_SIZE + 5, D))
    mx.eval(entries.keys, entries.values)
    store.append(entries)
    layer = attention_layers(model := make_llama(), make_prompt_cache(model))[0]
    view, before = FullView([store], layer), mx.get_active_memory()
    mx.reset_peak_memory()
    found = cluster_entries(view)
    assert mx.get_peak_memory() - before < entries.keys.nbytes / 2
    assert equal(found, cluster_entries(entries))
