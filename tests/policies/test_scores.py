"""Every policy's score against its formula in float64 NumPy."""

import mlx.core as mx
import numpy as np
import pytest
import reference

from mlx_snapkv import H2O, TOVA, KeyDiff, KeyNorm, LagKV, RandomRows, ScissorHands, StreamingLLM
from mlx_snapkv.entries.entries import Entries
from mlx_snapkv.entries.queries import Queries
from mlx_snapkv.errors import SnapKVError
from mlx_snapkv.policies import keydiff, lagkv


def make_entries(T=70, n=3, seed=0, dtype=mx.float32):
    rng = np.random.default_rng(seed)
    keys = mx.array(rng.normal(0.3, 1, size=(2, 2, T, 8)).astype(np.float32)).astype(dtype)
    queries = mx.array(rng.normal(size=(2, 4, n, 8)).astype(np.float32))
    return Entries(keys, keys, Queries(queries, range(T - n, T), 8**-0.5))


@pytest.mark.parametrize("anchor", ["mean", "median", "pairwise"])
@pytest.mark.parametrize("similarity", ["cosine", "dot", "euclidean"])
def test_keydiff(anchor, similarity, monkeypatch):
    entries = make_entries()
    policy = KeyDiff(anchor=anchor, similarity=similarity)
    for block_bytes in (keydiff.BLOCK_BYTES, 1):  # 1: blocks of 64 keys
        monkeypatch.setattr(keydiff, "BLOCK_BYTES", block_bytes)
        scores = np.asarray(policy.score(entries))
        for b in range(2):
            for head in range(2):
                expected = reference.keydiff(entries.keys[b, head], anchor, similarity)
                assert np.allclose(scores[b, head], expected, atol=1e-5)


@pytest.mark.parametrize("similarity", ["cosine", "dot", "euclidean"])
@pytest.mark.parametrize("kernel", [3, 7])
def test_pooled_keydiff(similarity, kernel):
    entries = make_entries()
    scores = np.asarray(KeyDiff(similarity=similarity, pool_kernel=kernel).score(entries))
    for b in range(2):
        for head in range(2):
            each = reference.keydiff(entries.keys[b, head], "mean", similarity)
            expected = reference.pool(each - each.min(), "avg", kernel) + each.min()
            assert np.allclose(scores[b, head], expected, atol=1e-5)


@pytest.mark.parametrize("kernel", [0, 4, 2.5])
def test_a_kernel_without_a_middle_is_refused(kernel):
    with pytest.raises(SnapKVError, match=f"keydiff option pool_kernel must be .*, got {kernel}"):
        KeyDiff(pool_kernel=kernel)


def test_keydiff_by_hand():
    """Three keys point one way and one another: the odd one out is kept."""
    keys = mx.array([[1.0, 0], [2, 0.1], [0.5, 0], [0, 3]])[None, None]
    assert mx.argmax(KeyDiff().score(Entries(keys, keys))).item() == 3


def test_keydiff_ranks_half_precision_keys_in_float32():
    entries = make_entries(dtype=mx.float16)
    assert KeyDiff().score(entries).dtype == mx.float32
    expected = reference.keydiff(entries.keys[0, 0].astype(mx.float32), "mean", "cosine")
    assert np.allclose(KeyDiff().score(entries)[0, 0], expected, atol=1e-5)


def test_a_key_of_zeros_is_no_nan():
    keys = mx.concatenate([mx.zeros((1, 1, 1, 8)), mx.ones((1, 1, 5, 8))], axis=2)
    for similarity in keydiff.SIMILARITIES:
        scores = KeyDiff(similarity=similarity).score(Entries(keys, keys))
        assert not mx.any(mx.isnan(scores)).item()


def test_tova_is_the_last_querys_attention_averaged_over_all_heads():
    entries = make_entries(n=1)
    raw = reference.votes(entries.queries, entries.keys, [69], entries.observed.scale)
    scores = np.asarray(TOVA().score(entries))
    assert np.allclose(scores, raw.mean(axis=1, keepdims=True), atol=1e-6)


@pytest.mark.parametrize("T, first", [(70, 60), (70, 68), (9000, 8990)])
def test_scissorhands_counts_queries(T, first):
    """Also those of tokens past the last entry, and over more entries than a block."""
    entries = make_entries(T, n=8)
    entries.observed = Queries(entries.queries, range(first, first + 8), 8**-0.5)
    raw = reference.above_average(entries.queries, entries.keys, range(first, first + 8), 8**-0.5)
    scores = np.asarray(ScissorHands().score(entries))
    off = np.abs(scores - raw)
    # A weight of 1/t but for its last bit may count or not.
    assert scores.max() > 4 and (off > 1e-6).mean() < 2e-4 and off.max() <= 0.5


def test_scissorhands_by_hand():
    """Once very much counts less than twice a little more than the average."""
    keys = mx.array([[9.0, 0], [0.5, 0.5], [0, 0]])[None, None]
    queries = mx.array([[1.0, 0.1], [-0.5, 2], [0, 3]])[None, None]
    entries = Entries(keys, keys, Queries(queries, range(2, 5), 1.0))
    assert ScissorHands().score(entries)[0, 0].tolist() == [1, 2, 0]


def test_key_norm_prefers_small_keys():
    entries = make_entries()
    norms = np.linalg.norm(np.asarray(entries.keys, np.float64), axis=-1)
    assert np.array_equal(np.argsort(KeyNorm().score(entries)), np.argsort(-norms))


@pytest.mark.parametrize("crosses", [False, True])
@pytest.mark.parametrize("lag, n_sink", [(8, 3), (16, 0), (23, 1), (2, 4)])
def test_lagkv(lag, n_sink, crosses, monkeypatch):
    entries = make_entries()
    rng = np.random.default_rng(1)
    entries.stored_values = mx.array(rng.normal(size=(2, 2, 70, 8)).astype(np.float32))
    policy = LagKV(lag_size=lag, n_sink=n_sink, cross_scoring=crosses)
    for block_bytes in (lagkv.BLOCK_BYTES, 1):  # 1: one block at a time
        monkeypatch.setattr(lagkv, "BLOCK_BYTES", block_bytes)
        scores = np.asarray(policy.score(entries))
        for b in range(2):
            for head in range(2):
                states = entries.keys[b, head], entries.values[b, head]
                expected = reference.lagkv(*states, n_sink, lag)
                end = n_sink + expected.size
                if not crosses:
                    expected = np.argsort(np.argsort(expected)) / lag
                assert np.allclose(scores[b, head, n_sink:end], expected.ravel(), atol=1e-6)
                assert (np.diff(scores[b, head, end:]) > 0).all() and scores[b, head, end] >= 1


def test_lagkv_by_hand():
    """Of two blocks of three, the entry whose coordinates differ most once they are scaled by the next block."""
    after = [[0.0, 0], [10, 1], [5, 0.5]]
    keys = mx.array([[1.0, 0.1], [10, 0], [2, 0.2], *after])[None, None]
    scores = LagKV(lag_size=3, n_sink=0).score(Entries(keys, keys))
    assert mx.argmax(scores[0, 0, :3]).item() == 1


def test_lagkv_keeps_the_newest_of_a_few():
    entries = make_entries()
    policy = LagKV(budget=20, n_sink=4, n_window=0)
    kept = policy.quotas(70, 1)[0].select(policy.score(entries))
    assert kept[0, 0].tolist() == [*range(4), *range(54, 70)]


def test_a_coordinate_that_does_not_change_is_no_nan():
    keys = mx.concatenate([mx.ones((1, 1, 40, 2)), mx.random.normal((1, 1, 40, 6))], axis=3)
    assert not mx.any(mx.isnan(LagKV(lag_size=8).score(Entries(keys, keys)))).item()


def test_streaming_llm_keeps_sinks_and_the_newest():
    entries = make_entries()
    policy = StreamingLLM(budget=20, n_sink=3)
    kept = policy.quotas(70, 1)[0].select(policy.score(entries))
    assert kept[0, 0].tolist() == [*range(3), *range(53, 70)]


def test_h2o_keeps_what_received_most():
    entries = make_entries()
    entries.received = mx.random.uniform(shape=(2, 2, 70))
    assert mx.array_equal(H2O().score(entries), entries.received)
    with pytest.raises(SnapKVError, match="h2o needs the attention of all queries"):
        H2O().score(make_entries())


def test_random_is_a_uniform_sample_that_no_schedule_changes():
    keys = mx.zeros((1, 4, 4000, 2))
    scores = RandomRows().score(Entries(keys, keys))
    assert len(set(scores[0, 0].tolist())) > 3990
    assert not mx.array_equal(scores[0, 0], scores[0, 1])
    assert not mx.array_equal(scores, RandomRows(seed=1).score(Entries(keys, keys)))
    best = np.sort(np.argsort(-np.asarray(scores[0, 0]))[:1000])
    assert abs(np.mean(best) - 2000) < 100 and abs(np.mean(best < 1000) - 0.25) < 0.05
    # Rows that an eviction left have the scores they had before.
    some = mx.arange(0, 4000, 3, dtype=mx.uint32)
    left = Entries(keys[:, :, ::3], keys[:, :, ::3])
    left.given_positions = mx.broadcast_to(some, (1, 4, some.size))
    assert mx.array_equal(RandomRows().score(left), scores[..., ::3])


def test_neighbours_of_a_distinct_key_stay_with_it():
    keys = mx.tile(mx.array([[1.0, 0.0]]), (11, 1))
    keys[5] = mx.array([0.0, 1.0])
    entries = Entries(keys[None, None], keys[None, None])
    scores = KeyDiff(pool_kernel=3).score(entries)[0, 0]
    assert set(mx.argsort(-scores)[:3].tolist()) == {4, 5, 6}
