"""The index of keys against float64 NumPy."""

import copy

import mlx.core as mx
import numpy as np
import pytest
from entry_helpers import normal

from mlx_snapkv.entries.queries import Queries
from mlx_snapkv.sparse import growing_rows
from mlx_snapkv.sparse.entry_file import SpillFile
from mlx_snapkv.sparse.index import KeyIndex, index_bytes

B, H, GROUPS, D, T = 1, 2, 3, 64, 600
KEYS, ONE = normal(B, H, T, D), normal(B, H * GROUPS, 1, D, seed=1)  # ONE is a query


@pytest.fixture
def low_rank():
    """Return keys that vary in only half of the directions, as many as the index stores, and queries."""
    keys = normal(B, H, T, D // 2) @ normal(B, H, D // 2, D, seed=1) + normal(B, H, 1, D, seed=2)
    return keys, normal(B, H * GROUPS, 5, D, seed=3)


def asking(queries) -> Queries:
    """Return the queries at positions after all keys."""
    return Queries(queries, range(T, T + queries.shape[2]), scale=1.0)


def logits(keys, queries):
    return np.array(queries, np.float64).reshape(B, H, -1, D) @ np.array(keys.mT, np.float64)


def lacking(logits):
    """Return, per KV head, each key's smallest distance from the largest logit over all queries."""
    return (logits - logits.max(axis=-1, keepdims=True)).max(axis=2)


def indexed(keys, queries=None, portions=(250, 1, 349), make_spill=None) -> KeyIndex:
    index, start = KeyIndex(keys, queries, make_spill), 0
    for n in portions:
        index.append(keys[:, :, start : start + n])
        start += n
    return index


@pytest.mark.parametrize("n", [1, 250, T])
def test_relevance_is_the_logits_distance_to_the_largest(low_rank, n):
    keys, queries = low_rank
    index, wanted = indexed(keys, queries), lacking(logits(keys[:, :, :n], queries))
    found = np.array(index.relevance(asking(queries), n))
    assert found.shape == (B, H, n)
    assert (found - wanted).std() <= 0.32 * wanted.std() + 1e-3  # 4 bits a component
    # An eighth of the keys' bytes in bfloat16, and 1/16 of that for powers of two.
    assert index_bytes(keys) == keys.size * 2 // 8 * 17 // 16
    assert (
        index_bytes(keys) <= index.codes.nbytes <= 1.5 * index_bytes(keys)
    )  # free room for later keys


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 192, 256, 576])
def test_heads_may_have_any_size(head_dim):
    """Components are padded to a size that MLX can multiply."""
    keys, queries = normal(1, 2, T, head_dim), normal(1, 4, 1, head_dim, seed=1)
    index = KeyIndex(keys)
    index.append(keys)
    found = np.array(index.relevance(asking(queries), T))
    wanted = lacking(
        np.array(queries, np.float64).reshape(1, 2, 2, -1) @ np.array(keys.mT, np.float64)
    )
    assert np.corrcoef(found.ravel(), wanted.ravel())[0, 1] > 0.6
    assert index_bytes(keys) <= index.codes.nbytes <= 1.2 * index_bytes(keys)


@pytest.fixture
def few_in_memory(monkeypatch):
    """Keep only the codes of the first 256 keys, and of up to 128 of the last, in memory."""
    monkeypatch.setattr(growing_rows, "ENTRIES_IN_MEMORY", 256)
    monkeypatch.setattr(growing_rows, "ENTRIES_MOVED", 128)


@pytest.mark.parametrize("logit_bytes", [0, 1 << 20])
def test_codes_in_a_file_rank_like_codes_in_memory(
    low_rank, few_in_memory, monkeypatch, logit_bytes
):
    """The logits either all fit into memory or are computed twice."""
    keys, queries = low_rank
    index, wanted = indexed(keys, queries, make_spill=SpillFile), indexed(keys, queries)
    assert index.codes.nbytes < 0.8 * wanted.codes.nbytes and index.codes.reads_allocate
    monkeypatch.setattr("mlx_snapkv.sparse.index.LOGIT_BYTES", logit_bytes)
    for n in (1, 250, 300, T):
        found = [x.relevance(asking(queries), n) for x in (index, wanted)]
        assert mx.allclose(*found, rtol=1e-4, atol=1e-3)


def test_an_index_is_restored_from_its_state_and_codes(low_rank, few_in_memory):
    keys, queries = low_rank
    index = indexed(keys, queries)
    found = KeyIndex.from_state(index.state, keys[:, :, :1])
    found.fill([index.codes.between(0, T)], SpillFile)
    assert (
        len(found) == found.n_keys_at_sampling == T
        and found.codes.nbytes < 0.8 * index.codes.nbytes
    )
    wanted = index.relevance(asking(queries), T)
    assert mx.allclose(found.relevance(asking(queries), T), wanted, rtol=1e-4, atol=1e-3)
    assert KeyIndex.from_state(index.state[:2], keys[:, :, :1]) is None
    assert KeyIndex.from_state(index.state, keys[:, :1, :1]) is None


def test_blocks_of_keys_rank_like_all_keys_at_once(low_rank, monkeypatch):
    """Each block's logits are computed twice."""
    keys, queries = low_rank
    index = indexed(keys, queries)
    whole = index.relevance(asking(queries), 550)
    monkeypatch.setattr("mlx_snapkv.sparse.index.LOGIT_BYTES", 0)
    assert mx.allclose(index.relevance(asking(queries), 550), whole, rtol=1e-4, atol=1e-3)


def alike(keys, query, index):
    """Return the correlation between the index's relevance and the exact one."""
    found = np.array(index.relevance(asking(query), T))
    return np.corrcoef(found.ravel(), lacking(logits(keys, query)).ravel())[0, 1]


def test_channels_are_weighed_by_the_size_of_queries():
    """The keys vary most in channels where queries are small."""
    varied = mx.arange(D) < D // 2
    keys = KEYS * mx.where(varied, 10.0, 1.0)
    queries = normal(B, H * GROUPS, 64, D, seed=1) * mx.where(varied, 0.01, 1.0)
    one = queries[:, :, :1]
    assert alike(keys, one, indexed(keys, queries)) > 2 * alike(keys, one, indexed(keys))


def test_the_best_keys_are_found_even_if_keys_vary_in_all_directions():
    """Half of the directions are enough. A quarter of the directions with twice the bits would not be."""
    found = indexed(KEYS, ONE).relevance(asking(ONE), T)
    for ours, wanted in zip(np.array(found)[0], lacking(logits(KEYS, ONE))[0]):
        assert len(set(np.argsort(-wanted)[:10]) & set(np.argsort(-ours)[:150])) >= 8


def test_a_components_largest_values_are_represented():
    """A few keys are far from all others, like those of a text's first tokens."""
    keys = mx.where(mx.arange(T)[:, None] % 100 == 7, 12.0, 1.0) * KEYS
    assert alike(keys, ONE, indexed(keys, ONE)) > 0.8


def test_an_index_can_be_truncated_and_copied(low_rank):
    keys, queries = low_rank
    index, wanted = indexed(keys, queries), indexed(keys, queries).relevance(asking(queries), T)
    other = copy.deepcopy(index)
    index.codes.truncate(200)
    index.append(-keys[:, :, 200:])
    assert mx.array_equal(other.relevance(asking(queries), T), wanted)
    index.codes.truncate(200)
    index.append(keys[:, :, 200:])
    assert len(index) == T and mx.array_equal(index.relevance(asking(queries), T), wanted)
