"""Half-precision entries are ranked like their float32 copies, however large they are, on a GPU as well."""

import dataclasses

import mlx.core as mx
import numpy as np
import pytest
from entry_helpers import in_blocks, normal

from mlx_snapkv import KeyDiff, SnapKV
from mlx_snapkv.compress.selection import top_positions
from mlx_snapkv.entries.entries import Entries
from mlx_snapkv.entries.quantization import Quantization
from mlx_snapkv.entries.queries import Queries
from mlx_snapkv.sparse.attending import mask_with_bias
from mlx_snapkv.sparse.clusters import Clusters
from mlx_snapkv.sparse.index import KeyIndex
from mlx_snapkv.sparse.options import PAGE_SIZE
from mlx_snapkv.sparse.page_means import page_means
from mlx_snapkv.sparse.residual import Residual

H, T, N, D, KEPT = 2, 2000, 64, 64, 300
# Spread and bias of keys, for logits up to 6, 5,000 and 70,000.
PLAIN, LARGE, HUGE = (1, 0), (30, 0), (30, 1000)
LEAST = {mx.float16: 0.99, mx.bfloat16: 0.97}


def made(spread, bias):
    """Return keys and queries in float32. The keys of each head share a bias, as in Qwen2.5."""
    keys = spread * normal(1, H, T, D, seed=1) + bias * normal(1, H, 1, D, seed=2)
    return keys, spread * normal(1, 2 * H, N, D, seed=3)


def entries_of(keys, queries, bits=None):
    entries = Entries(keys, keys, Queries(queries, range(T - N, T), D**-0.5))
    return entries.with_quantization(bits and Quantization(bits, 32))


def in_float32(entries):
    """Return the entries and their queries in float32."""
    queries = dataclasses.replace(
        entries.voting_queries, vectors=entries.queries.astype(mx.float32)
    )
    return Entries(*(x.astype(mx.float32) for x in entries.dequantized()), queries)


def by_index(entries):
    """Return the relevance that a sparse token's index computes for the entries."""
    index = KeyIndex(entries.keys, entries.queries)
    index.append(entries.keys)
    return index.relevance(dataclasses.replace(entries.voting_queries, indices=range(T, T + N)), T)


def overlap(scores, others):
    """Return the share of best entries that two scores have in common, for the KV head where it is smallest."""
    assert not mx.any(mx.isnan(scores)).item()
    pairs = zip(*(np.array(top_positions(x, KEPT))[0] for x in (scores, others)))
    return min(len(set(a) & set(b)) / KEPT for a, b in pairs)


RANKED = [SnapKV(top_k=KEPT).score, KeyDiff(budget=KEPT).score, by_index]


@pytest.mark.parametrize("score", RANKED, ids=["snapkv", "keydiff", "sparse"])
@pytest.mark.parametrize("sizes, dtype, bits", [
    (PLAIN, mx.float16, None), (PLAIN, mx.bfloat16, 8), (PLAIN, mx.bfloat16, 4),
    (LARGE, mx.float16, 8), (LARGE, mx.float16, 4), (LARGE, mx.bfloat16, None),
    (HUGE, mx.float16, None), (HUGE, mx.bfloat16, None), (HUGE, mx.bfloat16, 8),
    (HUGE, mx.float16, 4),
])  # fmt: skip
def test_entries_are_ranked_as_in_float32(sizes, dtype, bits, score, monkeypatch):
    """This applies both to one pass over the keys and to blocks."""
    entries = entries_of(*(x.astype(dtype) for x in made(*sizes)), bits)
    wanted = score(in_float32(entries))
    assert overlap(score(entries), wanted) >= LEAST[dtype]
    in_blocks(monkeypatch, 1 << 18, one_pass=0)
    assert overlap(score(entries), wanted) >= LEAST[dtype]


@pytest.mark.parametrize("score", RANKED[:2], ids=["snapkv", "keydiff"])
@pytest.mark.parametrize("sizes, dtype", [
    (PLAIN, mx.float16), (PLAIN, mx.bfloat16), ((3, 0), mx.bfloat16), (LARGE, mx.float16),
])  # fmt: skip
def test_rounding_entries_changes_few_ranks(sizes, dtype, score):
    """The reference is unrounded entries. bfloat16 has no case with large logits, which it rounds too much."""
    keys, queries = made(*sizes)
    rounded = entries_of(keys.astype(dtype), queries.astype(dtype))
    assert overlap(score(rounded), score(entries_of(keys, queries))) >= LEAST[dtype]


def test_the_sum_of_a_page_may_exceed_float16():
    entries = (6000 + 100 * normal(1, 1, 2 * PAGE_SIZE, 8)).astype(mx.float16)
    found, wanted = np.array(page_means(entries)), np.array(entries, np.float64)
    assert found.dtype == np.float16
    parts = [wanted[:, :, :PAGE_SIZE].mean(axis=2), wanted[:, :, PAGE_SIZE:].mean(axis=2)]
    assert np.allclose(found, np.stack(parts, axis=2), rtol=1e-3)


def test_the_bias_of_a_mean_may_exceed_float16():
    """At half the temperature, a head adds 100,000 to a logit of -200,000."""
    keys, heads = mx.full((1, 1, 2, 8), -250.0), mx.full((1, 1, 1, 8), 100.0)
    one = mx.ones((1, 1, 1, 1, 1))
    places = mx.arange(84, dtype=mx.uint32)[None, None]  # 44 in the first cluster, 40 in the second
    clusters = Clusters((places >= 44).astype(mx.uint16), keys, keys)
    residual = Residual(clusters, mx.array([[[300, 40]]]), 0 * one, one / 2)
    bias = residual.bias(heads, 1.0, places)
    mask = mask_with_bias(residual.bias(heads.astype(mx.float16), 1.0, places), 5)
    assert bias[..., 0].item() > 65504 == mask[..., 0].item()
    assert mask[..., 1].item() == -mx.inf and mask.dtype == mx.float16 and not mask[..., 2:].any()
