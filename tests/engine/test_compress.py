import mlx.core as mx
import numpy as np
import pytest
import reference
from mlx_lm.models.cache import KVCache, RotatingKVCache
from request_helpers import filled_cache
from tiny_models import make_llama

from mlx_snapkv import SnapKV, SnapKVError, Sparse, compress_prompt_cache, prefill

SIZES = {"top_k": 20, "n_sink": 4, "n_window": 32, "obs_window": 16}
POLICY = SnapKV(**SIZES, pool_kernel=5, pool="avg", on_full="slide")


def test_kept_entries_and_their_share_equal_the_float64_reference(tiny_model, tokens):
    """The reference votes, pools and selects per layer and head, using the model's own queries and keys."""
    caches, queries = filled_cache(tiny_model, tokens, 16)
    full = list(caches)
    report = compress_prompt_cache(tiny_model, caches, POLICY, queries=queries)
    for before, after, asked, share in zip(full, caches, queries, report.attention_share):
        if asked is None:
            assert after is before and share is None
            continue
        keys = before.keys[:, :, :200]
        raw = reference.votes(asked, keys, range(184, 200), keys.shape[-1] ** -0.5)
        for head in range(2):
            scores = raw[0, head].copy()
            scores[4:-32] = reference.pool(scores[4:-32], "avg", 5)
            kept = reference.select(scores, 4, 20, 32)
            assert after.positions[0, head].tolist() == kept
            assert mx.array_equal(after.keys[0, head], keys[0, head][mx.array(kept)])
        voted = np.take_along_axis(raw, np.asarray(after.positions).astype(int), axis=-1)
        assert share == pytest.approx(voted.sum() / raw.sum(), abs=1e-5)


@pytest.mark.parametrize(
    "queries, message",
    [
        (None, "queries are missing"),
        ([(1, 4, 16, 8)], "one item for each of 2 layers, got 1"),
        ([(1, 3, 16, 8)] * 2, "a multiple of 2 heads"),
        ([(1, 4, 16, 9)] * 2, "head_dim=8"),
        ([(2, 4, 16, 8)] * 2, "B=1"),
        ([(1, 4, 0, 8)] * 2, "1 to 200 tokens"),
        ([(1, 4, 201, 8)] * 2, "1 to 200 tokens"),
    ],
)
def test_queries_that_do_not_fit_are_refused(tokens, queries, message):
    model = make_llama()
    caches, _ = filled_cache(model, tokens)
    given = None if queries is None else [mx.zeros(shape) for shape in queries]
    with pytest.raises(SnapKVError, match=message):
        compress_prompt_cache(model, caches, POLICY, queries=given)
    assert all(type(c) is KVCache and c.offset == 200 for c in caches)


def test_caches_that_no_model_fills_like_this_are_refused(tokens):
    model = make_llama()
    caches, queries = filled_cache(model, tokens, 16)
    caches[1].trim(10)
    with pytest.raises(SnapKVError, match="all layers must hold the same number of tokens"):
        compress_prompt_cache(model, caches, POLICY, queries=queries)
    with pytest.raises(SnapKVError, match="'llama' has no full-attention layer"):
        compress_prompt_cache(model, [RotatingKVCache(8), RotatingKVCache(8)], POLICY)


def test_the_memory_of_the_full_entries_is_freed():
    model = make_llama(head_dim=64, num_key_value_heads=4)
    caches, queries = filled_cache(model, mx.random.randint(0, 64, (3000,)), 16)
    mx.eval([c.state for c in caches])
    full = caches[0].nbytes
    compress_prompt_cache(model, caches, POLICY, queries=queries)
    assert mx.get_cache_memory() < full / 4


def test_queries_that_the_caches_have_recorded_vote(tiny_model, tokens, tmp_path):
    """Sparse attention stores the prompt's last queries with its entries."""
    sparse = Sparse(store="file", store_dir=str(tmp_path), budget=64, read="dense")
    caches, _ = prefill(tiny_model, tokens, sparse)
    report = compress_prompt_cache(tiny_model, caches, POLICY)
    assert report.entries == 56 and all(0 < s < 1 for s in report.attention_share if s is not None)
