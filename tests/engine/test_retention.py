"""Requests that keep all entries: rejected options, kept entries, and counted memory."""

import functools
import tempfile
from dataclasses import replace

import pytest
from entry_helpers import exact_up_to
from mlx_lm.models.cache import make_prompt_cache
from request_helpers import plain, steps
from tiny_models import make_llama

from mlx_snapkv import SnapKVError, Sparse, prefill
from mlx_snapkv.engine.prefill import mlx_generate
from mlx_snapkv.engine.report import format_bytes
from mlx_snapkv.engine.serving import serve
from mlx_snapkv.planning.config import CompressionConfig
from mlx_snapkv.sparse.prompt_caches import make_caches

POLICY = "snapkv:top_k=20,n_sink=4,n_window=16,obs_window=8,pool_kernel=5,lookahead=0"
SPARSE = "budget=40,n_sink=4,n_window=16,read=dense,when=always"
STORES = ["memory", "8bit", "file"]


@pytest.fixture
def wide():
    """Return a random model with heads wide enough to be quantised."""
    return make_llama(head_dim=32)


WRONG = [
    ({"sparse": "store=remember"}, "^sparse option store must be memory, 8bit or file, got 'remember'$"),
    ({"sparse": {"store_dir": "/no/such"}}, "^sparse option store_dir must be a writable folder, got '/no/such'$"),
    ({"store": "file"}, r"^unknown option 'store': it is one of sparse attention, so give sparse=\{'store': 'file'\}$"),
    ({"policy": POLICY, "store": "8bit"}, "^unknown option 'store': .* so give sparse="),
    ({"policy": "auto", "store_dir": "."}, "^unknown option 'store_dir': .* so give sparse="),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_impossible_stores_are_refused_at_the_call(wide, tokens, options, message):
    with pytest.raises(SnapKVError, match=message):
        steps(wide, tokens, **options)


KEEPING = [SPARSE, f"{SPARSE},store=file"]


@pytest.mark.parametrize("sparse", KEEPING)
def test_a_prompt_cache_holds_the_whole_prompt_and_can_be_continued(wide, tokens, sparse):
    """The next request votes over all entries, so it gives the same answer as one request for the whole prompt."""
    reports, cache = [], make_prompt_cache(wide)
    steps(wide, tokens[:150], 6, prompt_cache=cache, sparse=sparse)
    # The first token of the answer was read before the compression.
    assert {c.offset for c in cache} == {151}
    for c in cache:
        c.trim(1)
    found = steps(wide, tokens[150:], prompt_cache=cache, on_report=reports.append, sparse=sparse)
    assert reports[0].compressed and reports[0].prompt_tokens == 200
    wanted = steps(wide, tokens, sparse=sparse)
    assert [t for t, _ in found] == [t for t, _ in wanted]


@pytest.mark.parametrize("store", ["8bit", "file"])
def test_a_question_of_a_single_token_votes_by_itself(wide, tokens, store):
    cache, reports = make_prompt_cache(wide), []
    plain(wide, tokens[:-1], 0, prompt_cache=cache)
    options = {"prompt_cache": cache, "on_report": reports.append}
    assert len(steps(wide, tokens[-1:], sparse=f"{SPARSE},store={store}", **options)) == 12
    assert reports[0].compressed and reports[0].prompt_tokens == 200


@pytest.mark.parametrize("store", STORES)
def test_a_compressed_prompt_cache_can_not_be_read_sparsely(wide, tokens, store):
    cache, _ = prefill(wide, tokens, POLICY)
    with pytest.raises(SnapKVError, match="needs a prompt cache with all entries"):
        steps(wide, tokens, prompt_cache=cache, sparse=f"{SPARSE},store={store}")


IN_MEMORY = ["memory", "8bit"]
WAYS = [
    *(f"{SPARSE},store={store}" for store in [*IN_MEMORY, "file"]),
    "budget=40,n_window=16,store=8bit",
]


@pytest.mark.parametrize("few", [50, 8192])
@pytest.mark.parametrize("sparse", WAYS)
def test_the_kv_memory_counts_every_array_in_memory(wide, tokens, sparse, few, monkeypatch):
    """Each array counts once, whether a token reads it (the index included) or it just stays in memory."""
    exact_up_to(monkeypatch, few)
    config = CompressionConfig(Sparse.from_string(sparse), turns=True)
    caches, found = make_caches(wide, config.sparse), []

    def compressed(report):
        stays = sum(cache.store.nbytes for cache in caches)
        found.append((report, stays, sum(cache.index_nbytes for cache in caches)))

    start = functools.partial(mlx_generate.generate_step, tokens, max_tokens=2)
    list(serve(start, wide, 200, 2, config, compressed, {"prompt_cache": caches}))
    ((report, stays, index),) = found
    chooses = report.read_per_token is not None
    assert chooses == (config.sparse is not None)
    assert (index > 0) == (few == 50 and chooses)
    one = report.kv_bytes_before / len(caches) / 201
    read = index + one * (sum(report.entries_kept) + report.means * len(caches))
    assert report.kv_bytes_staying == stays
    assert report.kv_bytes_after == report.kv_bytes_read + stays
    # Without a choice, the buffers of entries have free room.
    assert report.kv_bytes_read == pytest.approx(read) if chooses else report.kv_bytes_read > read
    assert report.file_bytes == sum(cache.store.file_nbytes for cache in caches)
    where = format_bytes(report.file_bytes or stays)
    assert f": a token reads {format_bytes(report.kv_bytes_read)} (float32" in str(report)
    assert f"all 200 entries stay in {where}" in str(report)
    assert report.warnings == []


def test_files_are_in_the_folder_that_was_given(wide, tokens, tmp_path, monkeypatch):
    made, make_file = [], tempfile.TemporaryFile
    recorded = lambda **how: made.append(how["dir"]) or make_file(**how)  # noqa: E731
    monkeypatch.setattr(tempfile, "TemporaryFile", recorded)
    sparse = f"{SPARSE},store=file,store_dir={tmp_path}"
    caches, _ = prefill(wide, tokens, sparse=sparse)
    list(steps(wide, tokens[:3], prompt_cache=caches, sparse=sparse))
    assert set(made) == {str(tmp_path)}


def test_the_name_of_a_setting_has_its_store_and_not_the_folder(tmp_path):
    in_files = Sparse(top_k=9, store="file")
    assert str(in_files) == "sparse:top_k=9,store=file"
    elsewhere = replace(in_files, store_dir=tmp_path)
    assert str(elsewhere) == str(in_files) and elsewhere == in_files != Sparse(top_k=9)
