"""Long answers: their oldest entries can be chosen like the prompt's, so that the number of entries read is bounded."""

import copy

import mlx.core as mx
import numpy as np
import pytest
import reference
from batch_helpers import Run, prompts_of
from entry_helpers import exact_up_to
from mlx_lm.models.cache import make_prompt_cache
from request_helpers import forced, random_tokens, steps
from tiny_models import make_llama

from mlx_snapkv import Sparse
from mlx_snapkv.caches.layers import attention_layers
from mlx_snapkv.entries.quota import Quota
from mlx_snapkv.models import attention_classes
from mlx_snapkv.models.patch import recording
from mlx_snapkv.sparse import cache as module
from mlx_snapkv.sparse import clusters
from mlx_snapkv.sparse.cache import MAX_RECENT, SparseKVCache
from mlx_snapkv.sparse.full_view import FullView
from mlx_snapkv.sparse.prompt_caches import make_caches
from mlx_snapkv.sparse.token_ranking import TokenRanking

N, FEW_RECENT = 100, 32
ALL, LITTLE = Quota(10_000, 2, 8), Quota(40, 2, 8)
TOKENS = random_tokens(N + 120)


@pytest.fixture(params=[True, False], ids=["index", "no index"])
def index(request, monkeypatch):
    """Return whether the entries that the answer chooses from have an index."""
    exact_up_to(monkeypatch, 0 if request.param else 8192)
    return request.param


@pytest.fixture
def few_recent(monkeypatch):
    monkeypatch.setattr(module, "MAX_RECENT", FEW_RECENT)


def choosing(model, quota):
    """Return the caches of a prompt of `N` tokens. All further tokens choose what they read."""
    caches = make_caches(model, Sparse())
    for layer in attention_layers(model, caches):
        layer.cache_in(caches).layer = layer
    model(TOKENS[None, :N], cache=caches)
    for layer in attention_layers(model, caches):
        view = FullView([layer.cache_in(caches).store], layer)
        view.index = view.make_index(None)
        layer.put(caches, SparseKVCache(TokenRanking(view, quota)))
    return caches


def said(model, caches, tokens, together=1):
    """Return the logits `(tokens, vocabulary)` for tokens that are fed `together` at a time."""
    logits = []
    with recording(attention_classes(model)):
        for i in range(0, len(tokens), together):
            logits.append(model(tokens[None, i : i + together], cache=caches)[0])
            mx.eval(logits[-1], [cache.state for cache in caches])
    return mx.concatenate(logits)


def away(found, full):
    """Return the mean KL divergence of predictions."""
    found, full = (x - mx.logsumexp(x, axis=-1, keepdims=True) for x in (found, full))
    return (mx.exp(full) * (full - found)).sum(axis=-1).mean().item()


def test_the_entries_read_stay_bounded_in_a_long_answer(index, monkeypatch):
    """The answer has 1,400 tokens. Reading less of it must hardly change the predictions."""
    model, together = make_llama(), 8
    answer = random_tokens(1400, seed=1)
    full = model(mx.concatenate([TOKENS[:N], answer])[None])[0, N:]
    read, attend = [], SparseKVCache.attend
    monkeypatch.setattr(
        SparseKVCache, "attend", lambda self, *args: read.append(self.size()) or attend(self, *args)
    )
    most = LITTLE.entries - LITTLE.n_window + MAX_RECENT + together
    moved = away(said(model, choosing(model, LITTLE), answer, together), full)
    assert most - together < max(read) <= most
    monkeypatch.setattr(module, "MAX_RECENT", answer.size)
    kept = away(said(model, choosing(model, LITTLE), answer, together), full)
    assert max(read) == LITTLE.entries + answer.size
    assert moved < 3 * kept


def test_tokens_that_choose_all_entries_equal_the_full_cache(index, few_recent):
    """Entries must not change when they move from the recent window to the entries to choose from."""
    model = make_llama()
    full = make_prompt_cache(model)
    model(TOKENS[None, :N], cache=full)
    caches = choosing(model, ALL)
    found, wanted = (said(model, c, TOKENS[N:]) for c in (caches, full))
    assert mx.allclose(found, wanted, atol=1e-4)
    for cache in caches:
        assert FEW_RECENT // 2 <= cache.ranking.n_newest <= FEW_RECENT
        assert cache.offset == cache.n_entries == len(TOKENS)
        assert (cache.ranking.view.index is not None) == index


def test_a_token_reads_the_entries_with_the_most_votes_of_its_own_queries(few_recent, monkeypatch):
    """NumPy computes the votes over prompt and answer. With a single layer, keys depend on no other token."""
    model = make_llama(head_dim=32, num_hidden_layers=1)
    caches, positions, gather = choosing(model, LITTLE), [], FullView.gather
    (cache,) = caches
    said(model, caches, TOKENS[N:-1])
    monkeypatch.setattr(
        FullView,
        "gather",
        lambda self, where: positions.append(np.array(where)) or gather(self, where),
    )
    n_recent = cache.ranking.n_newest
    said(model, caches, TOKENS[-1:])
    n = TOKENS.size
    full = make_caches(model, Sparse())
    layer = attention_layers(model, full)[0]
    layer.cache_in(full).layer = layer
    layer.cache_in(full).observe(n - 1, n, n)
    with recording(attention_classes(model)):
        model(TOKENS[None], cache=full)
    asked = layer.cache_in(full)
    keys = np.array(asked.keys_and_values()[0])
    scale = layer.family.scale_of(layer.attention, 32)
    stop, n_chosen = n - 1 - n_recent, LITTLE.entries - LITTLE.n_sink - LITTLE.n_window
    votes = reference.votes(asked.queries, keys[:, :, :stop], [n - 1], scale)[0]
    wanted = [{*(2 + np.argsort(-of_head[2:])[:n_chosen])} for of_head in votes]
    assert [{*head[:n_chosen]} for head in positions[0][0]] == wanted
    assert any(place >= N for positions in wanted for place in positions)


def test_copies_are_independent(index, few_recent):
    """Copies are made before and after entries have moved. Each must answer as if the other did not exist."""
    model = make_llama()
    wanted = said(model, choosing(model, LITTLE), TOKENS[N:])
    for n in (10, 50):
        caches = choosing(model, LITTLE)
        said(model, caches, TOKENS[N : N + n])
        copies = copy.deepcopy(caches)
        said(model, caches, TOKENS[:50])
        assert mx.array_equal(said(model, copies, TOKENS[N + n :]), wanted[n:])
        again = copy.deepcopy(copies)
        assert all(a.offset == b.offset for a, b in zip(again, copies))
        more = (said(model, c, TOKENS[:40]) for c in (again, copies))
        assert mx.array_equal(*more)


def test_a_batch_of_unequal_prompts_answers_as_single_requests(index, few_recent):
    prompts, limits = prompts_of(190, 120), [70, 60]
    run = Run(make_llama(), Sparse(budget=40, n_sink=2, n_window=8, when="always"))
    uids = run.insert(prompts, limits)
    run.finish()
    run.assert_alone(uids, prompts, limits)


def test_unread_entries_of_the_answer_are_seen_as_means(few_recent, monkeypatch):
    monkeypatch.setattr(clusters, "CLUSTER_SIZE", 16)
    model, answer = make_llama(), TOKENS[N:].tolist()

    def logits(**options):
        found = steps(model, TOKENS[:N], len(answer), sampler=forced(answer), **options)
        return mx.stack([x for _, x in found][-40:])

    full = model(TOKENS[None])[0, -41:-1]
    means, none = (
        logits(sparse=f"budget=24,n_window=6,residual={x},when=always") for x in ("means", "none")
    )
    assert 0 < away(means, full) < 0.2 * away(none, full)
