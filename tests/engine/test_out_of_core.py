"""Prompts whose entries go to a store: reading, flat memory, and continued prompts."""

import gc

import mlx.core as mx
import pytest
from entry_helpers import exact_up_to
from mlx_lm.models.cache import make_prompt_cache
from request_helpers import assert_same, plain, random_tokens, steps
from tiny_models import make_llama, make_qwen

from mlx_snapkv import Sparse, prefill
from mlx_snapkv.caches.layers import attention_layers, kv_bytes
from mlx_snapkv.planning import request_plan
from mlx_snapkv.sparse import growing_rows
from mlx_snapkv.sparse.full_view import FullView
from mlx_snapkv.sparse.options import CHUNK_SIZE, PAGE_SIZE
from mlx_snapkv.sparse.prompt_caches import make_caches
from mlx_snapkv.sparse.stored_cache import StoredKVCache

SPARSE = f"budget=60,n_sink=4,n_window=16,read_top_k={PAGE_SIZE},when=always"
IN_FILES = f"{SPARSE},store=file"


@pytest.fixture(params=[make_llama, make_qwen])
def wide(request):
    """Return a random model of each family, with heads wide enough to be quantised."""
    return request.param(head_dim=32)


@pytest.mark.parametrize(
    "make, residual", [(make_llama, "means"), (make_llama, "none"), (make_qwen, "means")]
)
def test_entries_in_files_and_in_memory_give_equal_answers(make, residual, monkeypatch):
    """Over several turns, answers are equal bit for bit, because files store entries exactly as computed.

    The prompt's last tokens, which read everything only if entries are in memory, are disabled.
    """
    monkeypatch.setattr(request_plan, "LAST_TOKENS", -CHUNK_SIZE)  # no token is among the last
    model, made = make(head_dim=32), []
    for way in ("memory", "file"):
        cache, sparse = make_prompt_cache(model), f"{SPARSE},residual={residual},store={way}"
        made.append([])
        for n in (CHUNK_SIZE + 350, 80, 1):
            made[-1] += steps(model, random_tokens(n), 4, prompt_cache=cache, sparse=sparse)
    assert_same(*made)


@pytest.mark.parametrize("n", [1, 16])
@pytest.mark.parametrize("store", ["file", "8bit"])
def test_a_short_prompt_s_answer_may_be_longer_than_the_budget(tokens, n, store):
    """The prompt was left to mlx-lm, so no entry of the answer is evicted."""
    model = make_llama(head_dim=32)
    sparse = f"budget=20,n_window=8,when=always,store={store}"
    found = steps(model, tokens[:n], 90, sparse=sparse)
    assert_same(found, plain(model, tokens[:n], 90))


@pytest.mark.parametrize("store", ["8bit", "file"])
def test_dense_reading_moves_each_chunk_to_the_store(wide, store, monkeypatch):
    """At most one chunk's entries are outside the store, so a store saves memory while a prompt is read, too."""
    unstored = []
    update = StoredKVCache.update_and_fetch

    def watched(cache, keys, values):
        found = update(cache, keys, values)
        unstored.append(cache.growing.offset)
        assert found[0].shape[2] == cache.offset  # a chunk reads all entries
        return found

    monkeypatch.setattr(StoredKVCache, "update_and_fetch", watched)
    sparse = f"budget=60,n_sink=4,n_window=16,read=dense,when=always,store={store}"
    cache, report = prefill(wide, random_tokens(300), sparse=sparse, prefill_step_size=64)
    assert max(unstored) <= 64 and report.read_per_chunk is None
    assert "a token reads" not in str(report)  # no token has chosen yet
    assert all(layer.layer_cache_in(cache).offset == 300 for layer in attention_layers(wide, cache))


@pytest.mark.parametrize("store", ["memory", "8bit", "file"])
def test_an_interrupted_prefill_leaves_the_callers_cache_as_it_was(wide, store):
    class Stopped(Exception):
        pass

    def stop(n_read, _):
        if n_read >= 100:
            raise Stopped

    sparse = f"budget=60,n_sink=4,n_window=16,when=always,store={store}"
    cache = make_caches(wide, Sparse.from_string(sparse))
    tokens = random_tokens(500)
    options = {"sparse": sparse, "prompt_cache": cache, "prefill_step_size": 64}
    prefill(wide, tokens[:200], **options)
    with pytest.raises(Stopped):
        prefill(wide, tokens[200:], prompt_progress_callback=stop, **options)
    layers = attention_layers(wide, cache)
    assert {layer.layer_cache_in(cache).offset for layer in layers} == {200}
    prefill(wide, tokens[200:], **options)
    assert {layer.layer_cache_in(cache).offset for layer in layers} == {500}


def test_memory_stays_flat_while_a_prompt_is_read():
    """Memory grows only by each page's mean key. The last tokens choose more pages, but not all of them."""
    model = make_llama(head_dim=64, num_hidden_layers=4)
    layer, made = 2 * 2 * 64 * 4, []  # bytes of a token in a layer

    def peaks(n):
        """Return the peak memory while chunks choose, the overall peak, and the memory in use afterwards."""
        tokens, seen = random_tokens(n), []
        gc.collect()
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        options = {"prompt_progress_callback": lambda *_: seen.append(mx.get_peak_memory())}
        made.append(prefill(model, tokens, sparse=IN_FILES, **options))
        peak = mx.get_peak_memory()
        gc.collect()
        return [x - before for x in (seen[-3], peak, mx.get_active_memory())]

    few, many = 4 * CHUNK_SIZE, 7 * CHUNK_SIZE
    growth = [(b - a) / (many - few) / layer for a, b in zip(peaks(few), peaks(many))]
    reading, last, after = growth
    means = 4 / (2 * PAGE_SIZE)  # mean keys of four layers
    # The last tokens rank more pages. All entries would be four times the bytes of a layer. On a busy machine, MLX may
    # compute more in advance for the shorter prompt, so the peaks may even fall.
    assert reading < 4 * means and last < 4 * means and abs(after) < 0.1
    for n, (caches, report) in zip((few, many), made, strict=True):
        assert report.file_bytes == 4 * n * layer
        assert all(type(c) is StoredKVCache and c.offset == n for c in caches)


def test_index_and_means_outside_memory_give_the_same_answer(monkeypatch):
    """There are several turns. Before the last one, the caches are trimmed."""
    exact_up_to(monkeypatch, 64)
    model, made, held = make_llama(head_dim=32), [], []
    for resident, block in ((1 << 16, 1 << 15), (128, 64)):
        monkeypatch.setattr(growing_rows, "ENTRIES_IN_MEMORY", resident)
        monkeypatch.setattr(growing_rows, "ENTRIES_MOVED", block)
        cache, found = make_prompt_cache(model), []
        for n in (CHUNK_SIZE + 350, 80, 1):
            found += steps(model, random_tokens(n), 4, prompt_cache=cache, sparse=IN_FILES)
        for layer in attention_layers(model, cache):
            layer.cache_in(cache).trim(60)
        found += steps(model, random_tokens(90), 4, prompt_cache=cache, sparse=IN_FILES)
        made.append(found)
        held.append(kv_bytes(cache))
    for (a, of_a), (b, of_b) in zip(*made, strict=True):
        assert a == b and mx.allclose(of_a, of_b, atol=1e-4)
    assert held[1] < 0.6 * held[0]


def test_an_index_lasts_over_turns_and_is_rebuilt_if_it_is_missing(wide, monkeypatch):
    exact_up_to(monkeypatch, 64)
    made, make = [], FullView.make_index
    monkeypatch.setattr(
        FullView, "make_index", lambda self, queries: made.append(len(self)) or make(self, queries)
    )
    cache = make_prompt_cache(wide)
    layers = attention_layers(wide, cache)
    for n, lost, n_made in ((150, False, 2), (30, False, 0), (20, True, 2), (400, False, 2)):
        made.clear()
        if lost:
            for layer in layers:
                layer.cache_in(cache).index = None
        steps(wide, random_tokens(n), 1, prompt_cache=cache, sparse=IN_FILES)
        held = {len(layer.cache_in(cache).index) for layer in layers}
        assert held == {layer.cache_in(cache).offset for layer in layers} and len(held) == 1
        assert len(made) == n_made  # one per layer; an index is rebuilt when entries have doubled


@pytest.mark.parametrize(
    ("store", "dtype"),
    [("file", "float32"), ("8bit", "8 bits")],
)
def test_the_report_of_a_text_reads_none_of_its_entries(store, dtype, monkeypatch):
    """A single layer of a book may have more entries than fit into memory."""

    def held(*_):
        raise AssertionError("all entries are read")

    monkeypatch.setattr(StoredKVCache, "held", held)
    model = make_llama(head_dim=32)
    sparse = f"{SPARSE},store={store}"
    _, report = prefill(model, random_tokens(2 * CHUNK_SIZE), sparse=sparse)
    assert report.kv_dtype == dtype and report.kv_bytes_before > 0
