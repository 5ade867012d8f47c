"""Prompt chunks that choose the pages they read: against float64 NumPy, and in models of all kinds."""

import functools
import math

import mlx.core as mx
import numpy as np
import pytest
import reference
import request_helpers
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, make_prompt_cache
from model_configs import make_model
from tiny_models import make_llama, make_qwen

from mlx_snapkv import SnapKVError, generate_step, prefill
from mlx_snapkv.caches.layers import attention_layers
from mlx_snapkv.engine.request import Request
from mlx_snapkv.entries.entries import Entries
from mlx_snapkv.entries.quantization import count_bytes, slice_rows
from mlx_snapkv.entries.spans import BLOCK_SIZE
from mlx_snapkv.models import attention_classes
from mlx_snapkv.models.patch import recording
from mlx_snapkv.planning import request_plan
from mlx_snapkv.planning.config import CompressionConfig
from mlx_snapkv.planning.request_plan import plan_request
from mlx_snapkv.sparse import growing_rows
from mlx_snapkv.sparse.full_view import FullView
from mlx_snapkv.sparse.options import (
    CHUNK_SIZE,
    CHUNK_WINDOW,
    LAST_TOKENS,
    N_VOTERS,
    PAGE_SIZE,
    Reach,
    Sparse,
)
from mlx_snapkv.sparse.page_means import PageMeans, page_means
from mlx_snapkv.sparse.page_ranking import RANKING_QUERIES, PageRanking
from mlx_snapkv.sparse.prefill_cache import SparsePrefillKVCache
from mlx_snapkv.sparse.prompt_caches import make_caches
from mlx_snapkv.sparse.stores import FileStore

N_CHOSEN = 4  # pages
# The chunk from START on may choose among three times the pages that it reads.
START = CHUNK_WINDOW + (1 + 3 * N_CHOSEN) * PAGE_SIZE + 5
N = START + CHUNK_SIZE
REACH = Reach(PAGE_SIZE, N_CHOSEN * PAGE_SIZE, CHUNK_WINDOW)
ALL = Reach(PAGE_SIZE, N, CHUNK_WINDOW)
TOKENS = mx.array(np.random.default_rng(0).integers(1, 64, N + LAST_TOKENS))


def sparse_caches(model, reach, store="memory", last_from=1 << 30):
    """Return caches that choose, and the views of all entries that they read from."""
    caches = make_caches(model, Sparse(store=store))
    views = []
    for layer in attention_layers(model, caches):
        stored = layer.cache_in(caches)
        stored.layer = layer
        views.append(FullView([stored.store], layer))
        ranking = PageRanking(views[-1], PageMeans(), reach, ALL, last_from, math.inf)
        if not layer.borrowers:
            layer.put(caches, SparsePrefillKVCache(stored, ranking))
    return caches, views


def read_by(model, caches, *ends):
    """Read TOKENS in chunks that end at `ends`, and return each chunk's logits."""
    logits = []
    with recording(attention_classes(model)):
        for start, end in zip((0, *ends), ends):
            logits.append(model(TOKENS[None, start:end], cache=caches))
            mx.eval(logits, [cache.state for cache in caches])
    return logits


def entries_and_queries(model):
    """Return all keys and rotated queries of the first layer, and its scale. They depend on no other token."""
    caches = make_caches(model, Sparse())
    layer = attention_layers(model, caches)[0]
    layer.cache_in(caches).observe(0, N, N)
    read_by(model, caches, N)
    full = layer.cache_in(caches)
    return *map(np.array, (full.keys_and_values()[0], full.queries)), full.scale


def chosen_pages(keys, queries, scale):
    """Return the pages `(n_kv_heads, N_CHOSEN)` chosen by the chunk that starts at `START`.

    A page is ranked by the largest share of attention that a sampled query of any head gives to its mean key.
    """
    keys, queries = np.float64(keys)[0], np.float64(queries)[0, :, START:N]
    asking = range(CHUNK_SIZE - 1, -1, -CHUNK_SIZE // RANKING_QUERIES)
    n_pages, group = (START - CHUNK_WINDOW) // PAGE_SIZE, len(queries) // len(keys)
    found = []
    for head, own in enumerate(keys):
        means = [own[p * PAGE_SIZE : (p + 1) * PAGE_SIZE].mean(axis=0) for p in range(1, n_pages)]
        readers = queries[head * group : (head + 1) * group]
        logits = np.array([[scale * np.stack(means) @ one[t] for t in asking] for one in readers])
        most = reference.softmax(logits).max(axis=(0, 1))
        found.append({*(1 + np.argsort(-most)[:N_CHOSEN])})
    return found


@pytest.mark.parametrize("store, resident", [("memory", None), ("file", None), ("file", 4)])
@pytest.mark.parametrize(
    "make",
    [make_llama, lambda: make_llama(head_dim=64), lambda: make_model("gpt_oss")],
    ids=["llama", "means in 8 bits", "gpt_oss"],
)
def test_a_chunk_reads_sink_window_and_the_pages_that_its_queries_choose(
    make, store, resident, monkeypatch
):
    """Entries are in memory or in files. So are the means of all but a few pages."""
    if resident is not None:
        monkeypatch.setattr(growing_rows, "ENTRIES_IN_MEMORY", resident * PAGE_SIZE)
        monkeypatch.setattr(growing_rows, "ENTRIES_MOVED", 2 * PAGE_SIZE)
    model = make()
    caches, (view, *_) = sparse_caches(model, REACH, store)
    gathered, gather = [], view.gather
    view.gather = lambda positions: gathered.append(np.array(positions)) or gather(positions)
    read_by(model, caches, START, N)
    (positions,) = gathered  # the first chunk has no earlier entries
    wanted = chosen_pages(*entries_and_queries(model))
    assert len({tuple(sorted(pages)) for pages in wanted}) > 1
    for found, pages in zip(positions[0], wanted, strict=True):
        in_pages = {p * PAGE_SIZE + i for p in {0, *pages} for i in range(PAGE_SIZE)}
        window = range((START - CHUNK_WINDOW) // PAGE_SIZE * PAGE_SIZE, START)
        assert found.tolist() == sorted({*in_pages, *window})


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_pages_means_are_held_in_8_bits(dtype):
    """Every number takes one byte, and groups of 64 share a scale and a bias in the keys' dtype."""
    model = make_llama(num_hidden_layers=1, head_dim=64)
    model.set_dtype(dtype)
    caches, (view,) = sparse_caches(model, REACH)
    read_by(model, caches, START, N)
    *_, means = caches[0].state
    B, H, n, D = view.read_keys(0, (START - CHUNK_WINDOW) // PAGE_SIZE * PAGE_SIZE).shape
    held = slice_rows(means, 0, n // PAGE_SIZE)  # without free room
    assert count_bytes(held) == B * H * n // PAGE_SIZE * (D + 2 * dtype.size)


def test_ranking_pages_of_a_file_holds_one_block_of_keys_at_a_time():
    model = make_llama(num_hidden_layers=1, head_dim=64)
    store = FileStore()
    keys = mx.random.normal((1, 2, 8 * BLOCK_SIZE + PAGE_SIZE, 64))
    store.append(Entries(keys, keys))
    view = FullView([store], attention_layers(model, make_prompt_cache(model))[0])
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    readers = PageMeans().make_readers(view, range(8 * BLOCK_SIZE // PAGE_SIZE))
    mx.eval([means() for means in readers])
    assert mx.get_peak_memory() - before < keys.nbytes / 2


def test_means_that_can_not_be_quantised_are_held_unquantised():
    model = make_llama(num_hidden_layers=1, head_dim=40)
    caches, (view,) = sparse_caches(model, REACH)
    read_by(model, caches, START, N)
    *_, (means, _) = caches[0].state
    keys = view.read_keys(0, (START - CHUNK_WINDOW) // PAGE_SIZE * PAGE_SIZE)
    wanted = page_means(keys)
    assert mx.array_equal(means[:, :, : wanted.shape[2]], wanted)


def test_attention_over_the_chosen_entries_equals_numpys():
    """The chosen entries are followed by the chunk's own tokens, each of which sees the tokens up to itself."""
    model = make_llama(num_hidden_layers=1)
    caches, _ = sparse_caches(model, REACH)
    read_by(model, caches, START)
    seen, attend = [], mx.fast.scaled_dot_product_attention

    def spy(queries, keys, values, **options):
        seen.append((queries, keys, values, attend(queries, keys, values, **options)))
        return seen[-1][-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx.fast, "scaled_dot_product_attention", spy)
        with recording(attention_classes(model)):
            model(TOKENS[None, START:N], cache=caches)
    queries, keys, values, out = (np.float64(x)[0] for x in seen[0])
    all_keys, all_queries, scale = entries_and_queries(model)
    n = keys.shape[1] - CHUNK_SIZE
    assert n <= REACH.max_read
    assert np.allclose(queries, all_queries[0, :, START:], atol=1e-4)
    for head, pages in enumerate(chosen_pages(all_keys, all_queries, scale)):
        positions = np.arange(N)
        is_read = np.isin(positions // PAGE_SIZE, [0, *pages]) | (
            positions >= (START - CHUNK_WINDOW) // PAGE_SIZE * PAGE_SIZE
        )
        assert np.allclose(keys[head], all_keys[0, head, is_read], atol=1e-5)
    visible = np.arange(n + CHUNK_SIZE) <= n + np.arange(CHUNK_SIZE)[:, None]
    wanted = reference.attention(queries, keys, values, visible, scale)
    assert np.allclose(out, wanted, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "gemma3n"])
def test_chunks_that_may_read_everything_equal_mlx_lms_bit_for_bit(name):
    model = make_model(name)
    ends, plain = (START // 2, START, N), make_prompt_cache(model)
    found = read_by(model, sparse_caches(model, ALL)[0], *ends)
    for a, b in zip(found, read_by(model, plain, *ends), strict=True):
        assert mx.array_equal(a, b)


def test_the_last_chunk_reads_everything_after_chunks_that_did_not():
    """The model has one layer, so its entries equal the full cache's in any case."""
    model = make_llama(num_hidden_layers=1)
    ends, plain = (START, N, N + LAST_TOKENS), make_prompt_cache(model)
    found = read_by(model, sparse_caches(model, REACH, last_from=N)[0], *ends)
    wanted = read_by(model, plain, *ends)
    same = [mx.array_equal(a, b) for a, b in zip(found, wanted, strict=True)]
    assert same == [True, False, True]


# Grouped queries, linear layers, sinks, shared entries, keys wider than values.
FAMILIES = "llama qwen3_next gpt_oss gemma4_text minicpm3"


@pytest.mark.parametrize("name", FAMILIES.split())
def test_a_chunk_that_reads_more_is_nearer_to_the_full_cache(name):
    """The logits of the chunk's own tokens are compared at every position."""
    model = make_model(name)
    full = read_by(model, make_prompt_cache(model), START, N)[1]

    def away(n_pages):
        caches, _ = sparse_caches(model, Reach(PAGE_SIZE, n_pages * PAGE_SIZE, CHUNK_WINDOW))
        return mx.abs(read_by(model, caches, START, N)[1] - full).mean(axis=(0, 2))

    n_pages = (START - CHUNK_WINDOW) // PAGE_SIZE - 1
    nearly, little = away(n_pages - 1), away(1)
    assert 0 < nearly.mean() < 0.4 * little.mean()


def test_linear_states_read_each_token_once():
    """States before the first sparse layer are exact. Those after it are close to the full cache's."""
    model = make_model("qwen3_next")
    plain = make_prompt_cache(model)
    full = {layer.index for layer in attention_layers(model, plain)}
    sparse, _ = sparse_caches(model, REACH)
    for caches in (plain, sparse):
        read_by(model, caches, START, N)
    away = {}
    for i in {*range(len(plain))} - full:
        (a, b) = (
            [x for _, x in tree_flatten(c[i].state) if x is not None] for c in (plain, sparse)
        )
        away[i] = max(
            (mx.linalg.norm(y - x) / mx.linalg.norm(x)).item() for x, y in zip(a, b, strict=True)
        )
    assert all((distance == 0) == (i < min(full)) for i, distance in away.items())
    assert 0 < max(away.values()) < 0.2


OPTIONS = f"budget=50%,read_top_k={N_CHOSEN * PAGE_SIZE},when=always"
LONG = mx.array(np.random.default_rng(1).integers(1, 64, N + LAST_TOKENS + 3))


def requested(model, tokens, cache=None, sparse=OPTIONS):
    """Return a request that has read its prompt but not yet computed the first token."""
    config = CompressionConfig(Sparse.from_string(sparse))
    cache = make_prompt_cache(model) if cache is None else cache
    request = Request(model, plan_request(model, config, tokens.size, cache), cache)
    start, step = 0, request.plan.chunk_size(2048)
    with request.recording():
        while start < tokens.size:
            logits = request.model(tokens[None, start : start + step], cache=request.caches)
            mx.eval(logits, [c.state for c in request.caches])
            start += step
    return request


@pytest.mark.parametrize("name", ["llama", "gemma3n", "gemma4_text"])
def test_the_last_queries_of_all_reading_layers_are_recorded(name):
    """The answer's index and residual need them, in order, one per query head."""
    model = make_model(name)
    request = requested(model, LONG)
    for layer in request.layers:
        cache = layer.cache_in(request.prompt_cache)
        assert cache.query_positions == range(LONG.size - N_VOTERS, LONG.size)
        assert not cache.waits_for_readers
    plain = make_caches(model, Sparse())
    for layer in request.layers:
        layer.cache_in(plain).layer = layer
        layer.cache_in(plain).observe(LONG.size - N_VOTERS, LONG.size, LONG.size)
    with recording(attention_classes(model)):
        model(LONG[None], cache=plain)
    first = request.layers[0]  # its queries depend on no choice
    found, wanted = (first.cache_in(x).queries for x in (request.prompt_cache, plain))
    assert found.shape == wanted.shape
    own = first.attention.num_heads if hasattr(first.attention, "num_heads") else None
    assert mx.allclose(found[:, :own], wanted[:, :own], atol=1e-4)


@pytest.mark.parametrize(
    "make, store",
    [(make_llama, "8bit"), (make_qwen, "file")],
)
def test_every_store_reads_the_prompt_alike(make, store, monkeypatch):
    """Quantised entries are read and ranked without unpacking. Entries in files equal those in memory.

    The prompt's last tokens, which read everything only if entries are in memory, are disabled.
    """
    monkeypatch.setattr(request_plan, "LAST_TOKENS", 0)
    model = make(head_dim=32)
    stored = f"{OPTIONS},store={store}"
    ((_, wanted),) = generate_step(LONG, model, max_tokens=1, sparse=OPTIONS)
    ((_, found),) = generate_step(LONG, model, max_tokens=1, sparse=stored)
    if store == "file":
        assert mx.array_equal(found, wanted)
    else:
        assert (mx.abs(found - wanted).max() < 0.02).item()


@pytest.mark.parametrize("when, reads_all", [("faster", True), ("always", False)])
def test_the_first_tokens_of_an_answer_that_adapts_read_all_entries(when, reads_all, monkeypatch):
    """Only the prompt's chunks chose. The model has one layer, so its entries equal the full cache's in any case."""
    monkeypatch.setattr(request_plan, "LAST_TOKENS", 0)
    model = make_llama(num_hidden_layers=1)
    sparse = OPTIONS.replace("always", when)
    options = {"max_tokens": 6, "sparse": sparse}
    tokens, found = zip(*generate_step(LONG, model, **options), strict=True)
    whole = mx.concatenate([LONG, mx.array(tokens[:-1])])
    logits = model(whole[None], cache=make_prompt_cache(model))[0, -len(tokens) :]
    wanted = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    is_same = [mx.allclose(a, b, atol=1e-4).item() for a, b in zip(found, wanted, strict=True)]
    assert not is_same[0] and is_same[1] and all(is_same[1:]) == reads_all


FOLLOW_UP = TOKENS[: CHUNK_SIZE + LAST_TOKENS]


@functools.cache
def after_follow_up(name, answer):
    """Return log-probabilities after LONG, an answer token and FOLLOW_UP, computed with the full cache."""
    whole = mx.concatenate([LONG, mx.array([answer]), FOLLOW_UP])
    return request_helpers.plain(make_model(name), whole, 1, prefill_step_size=CHUNK_SIZE)[0][1]


@pytest.mark.parametrize("name, store", [("llama", "memory"), ("qwen3_next", "file")])
def test_follow_ups_continue_from_a_prompt_that_was_read_sparsely(name, store):
    """A follow-up chooses from the entries of earlier requests, like one request for the whole text."""
    model, reports = make_model(name), []
    options = {"max_tokens": 1, "on_report": reports.append}

    def away(sparse):
        cache = make_prompt_cache(model)
        ((token, _),) = generate_step(LONG, model, prompt_cache=cache, sparse=sparse, **options)
        assert {c.offset for c in cache if hasattr(c, "offset")} == {LONG.size + 1}
        ((_, found),) = generate_step(
            FOLLOW_UP, model, prompt_cache=cache, sparse=sparse, **options
        )
        return mx.abs(found - after_follow_up(name, int(token))).max()

    n_pages = (LONG.size + 1 - CHUNK_WINDOW) // PAGE_SIZE - 1
    nearly, little = (
        away(f"budget=50%,read_top_k={n * PAGE_SIZE},when=always,store={store}")
        for n in (n_pages - 1, 1)
    )
    assert 0 < nearly < 0.7 * little
    assert [r.prompt_tokens for r in reports[:2]] == [LONG.size, LONG.size + 1 + FOLLOW_UP.size]
    most = Reach(PAGE_SIZE, (n_pages - 1) * PAGE_SIZE, CHUNK_WINDOW).max_read
    # No chunk of the first request had more pages than it may read.
    assert (
        reports[0].read_per_chunk is None and most - PAGE_SIZE < reports[1].read_per_chunk <= most
    )
    assert all(REACH.max_read > r.read_per_chunk > CHUNK_WINDOW for r in reports[2:])


def test_prefill_reads_as_a_request_does_and_keeps_all_entries():
    model = make_llama()
    cache, report = prefill(model, LONG, sparse=OPTIONS)
    request = requested(model, LONG)
    assert all(type(c) is KVCache and c.offset == LONG.size for c in cache)
    for mine, theirs in zip(cache, request.prompt_cache):
        for a, b in zip(mine.keys_and_values(), theirs.keys_and_values()):
            assert mx.allclose(a, b, atol=1e-5)
    assert (
        REACH.max_read - PAGE_SIZE < report.read_per_chunk <= REACH.max_read
        and report.entries_kept == [LONG.size] * 2
    )


@pytest.mark.parametrize("name", ["deepseek_v3", "gemma2", "iquestloopcoder", "plamo", "plamo2"])
def test_a_model_type_without_sparse_attention_is_refused(name):
    sentence = rf"^sparse attention is not possible on model type '{name}': its .*\. Give a policy"
    for sparse in (True, "store=file"):
        with pytest.raises(SnapKVError, match=sentence):
            generate_step(TOKENS, make_model(name), sparse=sparse)
