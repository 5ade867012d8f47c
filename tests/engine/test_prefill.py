import itertools

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache
from request_helpers import plain, steps
from tiny_models import make_llama

from mlx_snapkv import (
    KeyDiff,
    SnapKV,
    SnapKVCache,
    SnapKVError,
    compress_prompt_cache,
    prefill,
    saved,
)
from mlx_snapkv.compress.options import Compress
from mlx_snapkv.planning.config import CompressionConfig
from mlx_snapkv.planning.request_plan import plan_request
from mlx_snapkv.sparse.options import CHUNK_SIZE, Sparse
from mlx_snapkv.sparse.stored_cache import StoredKVCache

POLICY = SnapKV(top_k=20, n_sink=4, n_window=32, lookahead=4, on_full="slide")


def test_the_cache_is_compressed_and_the_lookahead_leaves_only_its_votes(tiny_model, tokens):
    """The lookahead's tokens are undone, in the states of linear layers as well."""
    full = make_prompt_cache(tiny_model)
    plain(tiny_model, tokens, 0, prompt_cache=full)
    cache, report = prefill(tiny_model, tokens, POLICY)
    cut = [c for c in cache if isinstance(c, SnapKVCache)]
    assert len(cut) == 2 and not any(isinstance(c, KVCache) for c in cache)
    for a, b in zip(full, cache):
        if b in cut:
            assert (b.offset, b.size(), b.n_pin) == (200, 56, 24)
            head = b.positions[0, 0]
            assert mx.all(head[1:] > head[:-1]).item()
            assert mx.array_equal(b.keys[0, 0], a.keys[0, 0][head])
        else:
            pairs = zip(a.state, b.state)
            assert all(mx.array_equal(x, y) for x, y in pairs if isinstance(x, mx.array))
    assert report.compressed and report.prompt_tokens == 200
    assert [n for n in report.entries_kept if n is not None] == [56, 56]
    assert all(0 < m <= 1 for m in report.attention_share if m is not None)
    assert report.kv_bytes_after == sum(c.nbytes for c in cut) < report.kv_bytes_before


@pytest.mark.parametrize("chunk", [1, 7, 50, 64, 167, 168, 198, 199, 500])
def test_the_policys_chunk_size_wins_and_the_window_is_a_separate_chunk(tokens, chunk):
    done = []
    policy = SnapKV(top_k=20, n_sink=4, n_window=32, obs_window=32, prefill_chunk=chunk)
    options = {"prompt_progress_callback": lambda n, total: done.append(n)}
    prefill(make_llama(), tokens, policy, **options)
    sizes = [b - a for a, b in itertools.pairwise(done)]
    assert max(sizes) <= chunk and sum(sizes) == 200
    if chunk < 199:  # 168 tokens come before the window of 32
        start = max(n for n in done if n <= 168)
        assert 168 - start < -(-168 // chunk)
    else:
        assert sizes == [199, 1]


def test_nothing_is_evicted_below_the_min_ctx_of_either_policy(tokens):
    model = make_llama()
    policy = "keydiff:budget=100,block=16,min_ctx=0 then snapkv:top_k=20,n_window=8,min_ctx=1000"
    cache, report = prefill(model, tokens, policy)
    assert "200 tokens are below min_ctx=1000" in report.reason and cache[0].offset == 200
    again = compress_prompt_cache(model, cache, "keydiff:budget=50,min_ctx=1000")
    assert "200 tokens are below min_ctx=1000" in again.reason and cache[0].offset == 200


def test_gated_prompts_give_mlx_lms_own_cache(tiny_model, tokens):
    cache, report = prefill(tiny_model, tokens[:-1], SnapKV(min_ctx=200))
    assert "below min_ctx=200" in report.reason
    assert [type(c) for c in cache] == [type(c) for c in make_prompt_cache(tiny_model)]
    found, wanted = plain(tiny_model, tokens[-1:], prompt_cache=cache), plain(tiny_model, tokens)
    assert [t for t, _ in found] == [t for t, _ in wanted]
    policy = SnapKV(top_k=20, n_sink=4, n_window=32, min_ctx=200)
    assert prefill(tiny_model, tokens, policy)[1].compressed


@pytest.mark.parametrize(
    "tokens, policy, message",
    [
        ([], POLICY, "the prompt is empty"),
        ([[1, 2], [3, 4]], POLICY, "one sequence of tokens, got shape"),
        ([1, 2], None, "needs a policy"),
        ([1, 2], "snapvk", "unknown policy"),
    ],
)
def test_impossible_prompts_and_policies_are_refused(tiny_model, tokens, policy, message):
    with pytest.raises(SnapKVError, match=message):
        prefill(tiny_model, tokens, policy)


@pytest.mark.parametrize("store", ["memory", "8bit", "file"])
@pytest.mark.parametrize("sparse", ["budget=60", "budget=200"])  # the second has nothing to choose
@pytest.mark.parametrize("given", [False, True])
def test_a_text_read_for_sparse_attention_is_complete_in_the_requested_store(
    tokens, store, sparse, given, tmp_path
):
    """The caches are in the caller's list, if it passed one, and can be saved."""
    model = make_llama(head_dim=32)
    own = make_prompt_cache(model) if given else None
    setting = f"{sparse},store={store}"
    cache, report = prefill(model, tokens, sparse=setting, prompt_cache=own)
    assert (cache is own) == given and report.compressed == (sparse == "budget=60")
    kind = KVCache if store == "memory" else QuantizedKVCache
    kind = StoredKVCache if "file" in store else kind
    if not given or report.compressed:
        assert [type(c) for c in cache] == [kind] * 2
    assert {c.offset for c in cache} == {200}
    path = tmp_path / "read.safetensors"
    saved.save(path, model, cache, tokens)
    answers = []
    for each in (saved.load(path, model).prompt_cache, cache):
        options = {"sparse": setting, "prompt_cache": each}
        answers.append([t for t, _ in steps(model, tokens[:9], 6, **options)])
    assert answers[0] == answers[1]


def test_the_chunk_size_leaves_a_short_chunk_before_the_voting_queries():
    def chunk_size(setting, limit):
        return plan_request(make_llama(), CompressionConfig(setting), 1000).chunk_size(limit)

    # 744 = 2 * 352 + 40, the smallest remainder.
    assert chunk_size(Compress(SnapKV(top_k=20)), 512) == 352
    assert chunk_size(Compress(KeyDiff(budget=100, schedule="once")), 512) == 512  # no query votes
    assert chunk_size(Compress(KeyDiff(budget=100, block=100)), 512) == 100
    assert chunk_size(Sparse(budget=500, read="sparse"), 2048) == CHUNK_SIZE
    assert chunk_size(Sparse(budget=500), 512) == 480  # 984 = 2 * 480 + 24
