"""Unread entries as weighted cluster means: against float64 NumPy, and in models."""

import functools
import itertools
from unittest import mock

import entry_helpers
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from model_configs import make_model
from reference import softmax
from request_helpers import steps
from tiny_models import make_llama

from mlx_snapkv import batch_generate
from mlx_snapkv.caches.layers import attention_layers
from mlx_snapkv.entries.entries import Entries
from mlx_snapkv.entries.quantization import Quantization
from mlx_snapkv.entries.queries import Queries
from mlx_snapkv.entries.quota import Quota
from mlx_snapkv.entries.spans import spans
from mlx_snapkv.sparse import clusters, residual, token_ranking
from mlx_snapkv.sparse.cache import SparseKVCache
from mlx_snapkv.sparse.full_view import FullView
from mlx_snapkv.sparse.stores import MemoryStore
from mlx_snapkv.sparse.token_ranking import TokenRanking

H, GROUP, D, N, M = 2, 3, 32, 150, residual.FITTING_QUERIES
BLOCKED = 48  # entries in a block
SCALE, QUOTA = 0.3, Quota(30, 2, 8)
normal = functools.partial(entry_helpers.normal, mean=0.3)


def choosing(observed, quantization=None):
    """Return a cache of `N` random entries, and its layer's keys and values."""
    layer = attention_layers(model := make_llama(), make_prompt_cache(model))[0]
    keys, values = normal(1, H, N, D, seed=1), normal(1, H, N, D, seed=2)
    # Entries of the second head with little attention get large values, so that means mislead.
    values[:, 1] += mx.where(keys[:, 1].sum(axis=-1, keepdims=True) < 6, 40.0, 0.0)
    store = MemoryStore(quantization)
    store.append(Entries(keys, values))
    view = FullView([store], layer)
    ranking = TokenRanking(view, QUOTA)
    ranking.fit_residual(observed)
    return SparseKVCache(ranking), view.keys, view.values


def read_by(logits, own):
    """Return two masks `(N,)`: what a query at position `own` with logits `(GROUP, N)` reads, and what it sees."""
    seen = np.arange(logits.shape[1]) <= own
    share = softmax(np.where(seen, logits, -np.inf)).mean(axis=0)
    stop = own - QUOTA.n_window
    middle = np.argsort(-share[QUOTA.n_sink : stop], kind="stable") + QUOTA.n_sink
    read = np.zeros(logits.shape[1], bool)
    read[: QUOTA.n_sink] = True
    read[stop : own + 1] = True
    read[middle[: QUOTA.entries - QUOTA.n_sink - QUOTA.n_window]] = True
    return read, seen


def k_means(keys):
    """Return the cluster of each of a head's keys, computed by NumPy block by block."""
    found, n_before = [], 0
    for start in range(0, len(keys), BLOCKED):
        block = keys[start : start + BLOCKED]
        n = -(-len(block) // clusters.CLUSTER_SIZE)
        centres = block[np.linspace(0, len(block) - 1, n + 2)[1:-1].astype(int)]
        for _ in range(clusters.K_MEANS_ROUNDS):
            of = np.square(block[:, None] - centres).sum(axis=-1).argmin(axis=1)
            centres = np.stack(
                [block[of == i].mean(axis=0) if i in of else 0 * centres[i] for i in range(n)]
            )
        found.append(of + n_before)
        n_before += n
    return np.concatenate(found)


def output(query, keys, values, read, seen, pair):
    """Return a head's attention `(head_dim,)` to read entries and to the cluster means of unread ones.

    Entries after the prompt belong to no cluster, because they are all read.
    """
    mass, temperature = pair
    logits, of = [keys[read] @ query], [values[read]]
    prompt, cluster = slice(min(N, len(keys))), k_means(keys[:N])
    for i in range(cluster.max() + 1):
        own = cluster == i
        unread = (own & seen[prompt] & ~read[prompt]).sum()
        if unread and mass:
            logit = temperature * (keys[prompt][own].mean(axis=0) @ query) + np.log(unread * mass)
            logits.append([logit])
            of.append(values[prompt][own].mean(axis=0)[None])
    return softmax(np.concatenate(logits)) @ np.concatenate(of)


@pytest.fixture
def small_clusters(monkeypatch):
    """Make clusters have 16 entries on average, and blocks three clusters."""
    monkeypatch.setattr(clusters, "CLUSTER_SIZE", 16)
    monkeypatch.setattr(clusters, "BLOCK_SIZE", BLOCKED)
    monkeypatch.setattr(clusters, "CLUSTERS_PER_BLOCK", BLOCKED // 16)
    monkeypatch.setattr(clusters, "spans", functools.partial(spans, block=BLOCKED))


def float64(*arrays):
    return [np.array(x[0], np.float64) for x in arrays]


@pytest.mark.parametrize("quantization", [None, Quantization(8, 32)])
def test_factors_and_outputs_equal_the_reference(small_clusters, quantization):
    queries = normal(1, H * GROUP, M, D, seed=3) + 0.7  # similar queries
    cache, keys, values = choosing(Queries(queries, range(N - M, N), SCALE), quantization)
    keys, values, asked = float64(keys, values, queries * SCALE)
    pairs = list(itertools.product(residual.MASSES, residual.TEMPERATURES))
    best = []
    for head in range(H * GROUP):
        kv = head // GROUP
        errors = np.zeros(len(pairs))
        for j, own in enumerate(range(N - M, N)):
            logits = asked[kv * GROUP : (kv + 1) * GROUP, j] @ keys[kv].T
            read, seen = read_by(logits, own)
            full = softmax(np.where(seen, keys[kv] @ asked[head, j], -np.inf)) @ values[kv]
            for i, pair in enumerate(pairs):
                found = output(asked[head, j], keys[kv], values[kv], read, seen, pair)
                errors[i] += np.square(found - full).sum()
        best.append(pairs[int(errors.argmin())])
    mass = np.exp(np.array(cache.ranking.residual.log_mass).reshape(-1))
    temperature = np.array(cache.ranking.residual.temperature).reshape(-1)
    assert np.allclose(list(zip(mass, temperature)), best)
    assert len(set(best)) > 1 and max(best)[0] > 0

    # A token of the answer takes the steps of a patched attention module.
    query, new = normal(1, H * GROUP, 1, D, seed=4), normal(1, H, 1, D, seed=5)
    mask = cache.make_mask(1)
    out = cache.attend(query, *cache.update_and_fetch(new, new), SCALE, mask)
    assert cache.n_entries == QUOTA.entries + 1 + cache.ranking.n_means
    (asked,), (new,) = float64(query * SCALE), float64(new)
    for head in range(H * GROUP):
        kv = head // GROUP
        every, of = np.concatenate([keys[kv], new[kv]]), np.concatenate([values[kv], new[kv]])
        logits = asked[kv * GROUP : (kv + 1) * GROUP, 0] @ keys[kv].T
        share = softmax(logits).mean(axis=0)
        stop = N - QUOTA.n_window
        read = np.ones(N + 1, bool)
        middle = np.argsort(-share[QUOTA.n_sink : stop], kind="stable") + QUOTA.n_sink
        read[middle[QUOTA.entries - QUOTA.n_sink - QUOTA.n_window :]] = False
        wanted = output(asked[head, 0], every, of, read, np.ones(N + 1, bool), best[head])
        assert np.allclose(out[0, head, 0], wanted, atol=1e-4)


def test_clusters_of_whole_blocks_may_be_known(small_clusters):
    """Later entries are clustered, and the factors equal those after clustering all entries."""
    observed = Queries(normal(1, H * GROUP, M, D, seed=3) + 0.7, range(N - M, N), SCALE)
    cache, _, _ = choosing(observed)
    wanted = arrays(cache.ranking.residual)
    for n in (BLOCKED, N):
        known = cache.ranking.residual.clusters.complete_blocks().within_first(n)
        ranking = TokenRanking(cache.ranking.view, QUOTA)
        ranking.fit_residual(observed, known)
        assert all(map(mx.array_equal, arrays(ranking.residual), wanted))


def arrays(weighed):
    held = weighed.clusters
    return held.ids, held.keys, held.values, weighed.log_mass, weighed.temperature


def test_clusters_of_whole_blocks_are_kept_for_the_next_turn(small_clusters, monkeypatch):
    """Caches with entries in files store the clusters, and drop those of trimmed entries."""
    model, made = make_llama(), mock.Mock(wraps=clusters.cluster_entries)
    monkeypatch.setattr(token_ranking, "cluster_entries", made)
    cache, known = make_prompt_cache(model), 0
    layers = attention_layers(model, cache)
    for seed, n in ((1, 300), (2, 100)):
        prompt = mx.random.randint(0, 60, (n,), key=mx.random.key(seed))
        options = {"sparse": "budget=24,n_window=6,store=file", "prompt_cache": cache}
        steps(model, prompt, 3, **options)
        assert {(*call.args, 0)[1] for call in made.call_args_list} == {known}
        made.reset_mock()
        held = [layer.cache_in(cache) for layer in layers]
        (known,) = {x.clusters.n_entries for x in held}
        assert known % BLOCKED == 0 and 0 <= held[0].offset - known < BLOCKED + 5
    for x in held:
        x.trim(x.offset - BLOCKED - 7)
        assert x.clusters.n_entries == BLOCKED and x.clusters.keys.shape[2] == 3
        x.trim(8)
        assert x.clusters is None


def test_a_long_texts_factors_are_estimated_from_some_of_its_pages(small_clusters, monkeypatch):
    """All pages are equal here, so any sample must give the exact result."""
    monkeypatch.setattr(residual, "SAMPLED_RUN", 16)
    n_pages, ends = 40, range(16, 16 * 41)
    entries = Entries(*(_alike(n_pages, seed) for seed in (1, 2)))
    read = mx.tile(mx.arange(16) % 5 == 0, n_pages + 2) | (mx.arange(16 * 42) >= ends.stop)
    read = mx.broadcast_to(read, (1, H, M, read.size))
    queries = normal(1, H * GROUP, M, D, seed=3) * SCALE
    example = residual.Example(queries, read, ends, 16 * 42 - M)
    found = clusters.cluster_entries(entries)
    wanted, reads = residual.distances(entries, found, example), mock.Mock(wraps=entries.read_keys)
    monkeypatch.setattr(residual, "SAMPLED_ENTRIES", 100)
    monkeypatch.setattr(entries, "read_keys", reads)
    assert mx.allclose(residual.distances(entries, found, example), wanted, rtol=1e-3, atol=1e-4)
    spans_read = [call.args for call in reads.call_args_list]
    assert sum(stop - start for start, stop in spans_read) == 16 + 16 * 6 + 16


def _alike(n_pages, seed):
    """Return the entries `(1, H, n, D)` of a first page, `n_pages` equal pages, and a last page."""
    first, middle, last = normal(3, 1, H, 16, D, seed=seed)
    return mx.concatenate([first, mx.tile(middle, (1, 1, n_pages, 1)), last], axis=2)


def moved(model, prompt, **options):
    """Return the mean KL divergence from the full cache's predictions after a prompt."""

    def logprobs(**more):
        said = itertools.cycle(range(5, 60))
        found = steps(model, prompt, 12, sampler=lambda _: mx.array([next(said)]), **more)
        return mx.stack([logprobs for _, logprobs in found])

    full, other = logprobs(), logprobs(**options)
    return (mx.exp(full) * (full - other)).sum(axis=-1)[2:].mean().item()


FAMILIES = "llama qwen3_next gpt_oss".split()


@pytest.mark.parametrize("store", ["memory", "8bit", "file"])
@pytest.mark.parametrize("name", FAMILIES)
def test_means_bring_predictions_nearer_to_the_full_caches(
    name, store, small_clusters, monkeypatch
):
    if store == "8bit" and name != "llama":
        pytest.skip("heads of 32 are llama's")
    model = make_llama(head_dim=32) if name == "llama" else make_model(name)
    prompt = mx.random.randint(0, 60, (200,), key=mx.random.key(0))
    sparse = f"budget=24,n_sink=2,n_window=6,read=dense,when=always,store={store}"
    weighed = moved(model, prompt, sparse=sparse)
    monkeypatch.setattr(TokenRanking, "fit_residual", lambda *args: None)
    assert 0 < weighed < 0.6 * moved(model, prompt, sparse=sparse)


def test_a_batch_of_unequal_prompts_answers_as_single_requests(demo_llama, small_clusters):
    model, tokenizer = demo_llama
    prompts = [[5 + i % (40 + n) for i in range(n)] for n in (150, 90, 220)]
    options = {"sparse": "budget=24,n_sink=2,n_window=6"}
    together = batch_generate(model, tokenizer, prompts, max_tokens=12, **options).texts
    alone = [batch_generate(model, tokenizer, [p], max_tokens=12, **options).texts for p in prompts]
    assert together == [text for (text,) in alone]


def test_factors_are_contiguous_for_the_kernels():
    found = residual.best_factors(normal(len(residual.PAIRS), 1, H, GROUP, seed=3))
    mx.eval(found)
    assert [x.shape for x in found] == [(1, H, GROUP, 1, 1)] * 2
    assert all(memoryview(x).c_contiguous for x in found)
