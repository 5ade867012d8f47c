"""Every policy's score against its formula in float64 NumPy."""

import mlx.core as mx
import numpy as np
import pytest
import reference
from entry_helpers import asked, in_blocks, make_entries, votes_of

from mlx_snapkv import (
    H2O,
    TOVA,
    KeyDiff,
    KeyNorm,
    LagKV,
    RandomEviction,
    ScissorHands,
    StreamingLLM,
)
from mlx_snapkv.compress.policies import lagkv
from mlx_snapkv.compress.selection import select
from mlx_snapkv.entries.entries import Entries
from mlx_snapkv.entries.queries import Queries
from mlx_snapkv.errors import SnapKVError

pytestmark = pytest.mark.usefixtures("short_blocks")

HEADS = list(np.ndindex(2, 2))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
@pytest.mark.parametrize("anchor", ["mean", "median", "pairwise"])
@pytest.mark.parametrize("similarity", ["cosine", "dot", "euclidean"])
def test_keydiff_equals_the_reference(anchor, similarity, dtype, monkeypatch):
    """Scores are float32, whatever the dtype of the keys."""
    in_blocks(monkeypatch, 1)  # blocks of 64 keys
    entries = make_entries(B=2, dtype=dtype)
    scores = np.asarray(KeyDiff(anchor=anchor, similarity=similarity).score(entries))
    assert scores.dtype == np.float32
    for head in HEADS:
        keys = entries.keys[head].astype(mx.float32)
        expected = reference.keydiff(keys, anchor, similarity)
        assert np.allclose(scores[head], expected, atol=1e-5)


@pytest.mark.parametrize("policy", [KeyDiff(), KeyDiff(similarity="euclidean"), LagKV()])
def test_keys_of_zeros_and_constant_coordinates_give_no_nan(policy):
    keys = mx.concatenate([mx.zeros((1, 1, 1, 8)), mx.ones((1, 1, 39, 8))], axis=2)
    assert not mx.any(mx.isnan(policy.score(Entries(keys, keys)))).item()


def test_tova_is_the_last_querys_attention_averaged_over_all_heads():
    entries = make_entries(n=1)
    wanted = votes_of(entries).mean(axis=1, keepdims=True)
    assert np.allclose(TOVA().score(entries), wanted, atol=1e-6)


@pytest.mark.parametrize("T, first", [(70, 60), (70, 68), (9000, 8990)])
def test_scissorhands_counts_queries_that_give_above_average_attention(T, first):
    """Tokens after the last entry count as well, and there may be more entries than fit into a block."""
    entries = make_entries(T=T, n=8)
    entries.voting_queries = Queries(entries.queries, range(first, first + 8), 8**-0.5)
    scores = np.asarray(ScissorHands().score(entries))
    off = np.abs(scores - reference.above_average(*asked(entries)))
    # A weight that equals 1/t except for its last bit may count or not.
    assert scores.max() > 4 and (off > 1e-6).mean() < 2e-4 and off.max() <= 0.5


def test_key_norm_prefers_small_keys():
    entries = make_entries()
    norms = np.linalg.norm(np.asarray(entries.keys, np.float64), axis=-1)
    assert np.array_equal(np.argsort(KeyNorm().score(entries)), np.argsort(-norms))


@pytest.mark.parametrize("lag, n_sink, n_bytes", [(8, 3, 1), (23, 1, 8 << 20), (2, 4, 1)])
def test_lagkv_equals_the_reference(lag, n_sink, n_bytes, monkeypatch):
    monkeypatch.setattr(lagkv, "LAG", lag)
    monkeypatch.setattr(lagkv, "BLOCK_BYTES", n_bytes)  # 1: one block at a time
    entries = make_entries(B=2)
    scores = np.asarray(LagKV(n_sink=n_sink).score(entries))
    for head in HEADS:
        expected = reference.lagkv(entries.keys[head], entries.values[head], n_sink, lag)
        end = n_sink + expected.size
        ranks = np.argsort(np.argsort(expected)) / lag
        assert np.allclose(scores[head][n_sink:end], ranks.ravel(), atol=1e-6)
        assert (np.diff(scores[head][end:]) > 0).all() and scores[head][end] >= 1


@pytest.mark.parametrize(
    "policy", [LagKV(budget=20, n_sink=3, n_window=0), StreamingLLM(budget=20, n_sink=3)]
)
def test_streaming_llm_and_lagkv_below_a_block_keep_sink_and_newest_entries(policy, monkeypatch):
    monkeypatch.setattr(lagkv, "LAG", 128)
    kept = select(policy.score(make_entries()), policy.quota(70))
    assert kept[0, 0].tolist() == [*range(3), *range(53, 70)]


def test_h2os_score_is_the_received_attention():
    entries = make_entries()
    entries.received_attention = mx.random.uniform(shape=(1, 2, 70))
    assert mx.array_equal(H2O().score(entries), entries.received_attention)
    with pytest.raises(SnapKVError, match="h2o needs the attention of all queries"):
        H2O().score(make_entries())


def test_random_eviction_is_a_uniform_sample_that_earlier_evictions_do_not_change():
    keys = mx.zeros((1, 4, 4000, 2))
    scores = RandomEviction().score(Entries(keys, keys))
    assert not mx.array_equal(scores[0, 0], scores[0, 1])
    assert not mx.array_equal(scores, RandomEviction(seed=1).score(Entries(keys, keys)))
    best = np.argsort(-np.asarray(scores[0, 0]))[:1000]
    assert abs(np.mean(best) - 2000) < 100 and abs(np.mean(best < 1000) - 0.25) < 0.05
    # Entries that an eviction has left keep their scores.
    some = mx.broadcast_to(mx.arange(0, 4000, 3, dtype=mx.uint32), (1, 4, 1334))
    left = Entries(keys[:, :, ::3], keys[:, :, ::3], explicit_positions=some)
    assert mx.array_equal(RandomEviction().score(left), scores[..., ::3])
