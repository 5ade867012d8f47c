"""Everything that a policy may ask of a layer, and Expected Attention, against float64 NumPy from a model's weights."""

from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
import pytest
import reference
from entry_helpers import in_blocks
from mlx_lm.models.cache import make_prompt_cache
from request_helpers import steps
from tiny_models import make_llama

from mlx_snapkv import ExpectedAttention, SnapKVError
from mlx_snapkv.caches import layers
from mlx_snapkv.caches.layers import attention_layers
from mlx_snapkv.compress.options import Compress
from mlx_snapkv.compress.policy import Policy
from mlx_snapkv.compress.recording import RecordingKVCache
from mlx_snapkv.engine.request import Request
from mlx_snapkv.entries.entries import Entries
from mlx_snapkv.entries.queries import Queries
from mlx_snapkv.models import attention_classes
from mlx_snapkv.models.patch import recording
from mlx_snapkv.planning.config import CompressionConfig
from mlx_snapkv.planning.request_plan import plan_request

T, N, FIRST = 60, 5, 4  # tokens, voting queries, first position in the statistics
N_HEADS, H, D, GROUP = 4, 2, 8, 2


@dataclass(frozen=True, kw_only=True)
class Asking(ExpectedAttention):
    """A policy that asks for everything."""

    obs_window = N

    def score(self, entries):
        assert entries.layer.attention.o_proj.weight.size
        return super().score(entries) + entries.raw_queries.sum() + entries.attention.sum()


def read(model, statistics_from=None, chunks=(17, 1, 42)):
    """Read `T` tokens. Return each layer's entries, the inputs of the layers `(T, hidden)`, and the caches."""
    caches = [RecordingKVCache(T - N, T, T) for _ in model.layers]
    inputs = [[] for _ in caches]
    for layer, cache, given in zip(attention_layers(model, caches), caches, inputs):
        cache.layer, cache.statistics_from = layer, statistics_from
        block = model.layers[layer.number]
        block.input_layernorm = watched(block.input_layernorm, given)
    tokens = mx.random.randint(0, 64, (1, T), key=mx.random.key(3))
    with recording(attention_classes(model)):
        for part in mx.split(tokens, np.cumsum(chunks[:-1]).tolist(), axis=1):
            model(part, cache=caches)
    return [cache.held() for cache in caches], [np.concatenate(given) for given in inputs], caches


def watched(norm, given):
    def call(x):
        given.append(np.asarray(norm(x)[0], np.float64))
        return norm(x)

    return call


def heads(x, weight):
    """Return a projection's output per head, `(heads, T, D)`."""
    return (x @ np.asarray(weight, np.float64).T).reshape(len(x), -1, D).transpose(1, 0, 2)


def rotated(x, positions):
    """Return `x` `(heads, n, D)` after LLaMA's RoPE."""
    return reference.rotated(x, np.asarray(positions)[:, None] * 1e4 ** (-np.arange(0, D, 2) / D))


def expected_of(attention, x):
    """Compute raw queries, weights, mean and covariance from nothing but a layer's inputs and weights."""
    queries = heads(x, attention.q_proj.weight)
    keys = rotated(heads(x, attention.k_proj.weight), range(T))
    raw, asked = queries[:, T - N :], range(T - N, T)
    weights = reference.weights(rotated(raw, asked)[None], keys[None], asked, D**-0.5)[0]
    covariance = np.stack([np.cov(q[FIRST:].T, bias=True) for q in queries])
    return raw, weights, queries[:, FIRST:].mean(axis=1), covariance


@pytest.mark.parametrize("chunks", [(T,), (2, 1, 1, 56)])
def test_all_values_a_policy_may_ask_for_equal_the_reference(chunks):
    for number, (entries, x, _) in enumerate(zip(*read(make_llama(), FIRST, chunks))):
        assert entries.layer.number == number
        statistics = entries.statistics.mean, entries.statistics.covariance
        found = entries.raw_queries, entries.attention, *statistics
        for ours, wanted in zip(found, expected_of(entries.layer.attention, x)):
            assert ours.dtype == mx.float32 and np.allclose(ours[0], wanted, atol=1e-4)


def test_tokens_fed_again_are_counted_once():
    model = make_llama()
    *_, caches = read(model, FIRST)
    before = caches[0].statistics.mean
    assert all(cache.trim(10) for cache in caches)
    with recording(attention_classes(model)):
        model(mx.zeros((1, 10), mx.int32), cache=caches)
    assert mx.array_equal(caches[0].statistics.mean, before).item()


def test_values_that_are_not_requested_are_not_computed(monkeypatch):
    calls, watched = [], lambda *args: calls.append(args) or args[1]
    monkeypatch.setattr(layers.AttentionLayer, "undo_rope", watched)
    (entries, _), _, caches = read(make_llama())
    entries.votes, entries.queries, entries.positions  # noqa: B018
    assert not calls and caches[0].statistics is None and not caches[0].moments.sums
    assert not {"attention", "raw_queries"} & set(vars(entries))
    assert entries.raw_queries is entries.queries and len(calls) == 1


GAPS = Queries(mx.zeros((1, N_HEADS, 2, D)), range(4, 6))


@pytest.mark.parametrize(
    "ask, message",
    [
        (lambda e: e.queries, "queries are missing: pass queries="),
        (lambda e: e.layer.attention, "prefill with mlx_snapkv.prefill"),
        (lambda e: e.statistics.mean, "give the policy a query_statistics"),
        (lambda e: ExpectedAttention().score(e), "prefill with mlx_snapkv"),
        (lambda e: replace(e, voting_queries=GAPS, explicit_positions=e.positions + 3).raw_queries, "a start"),
    ],
)  # fmt: skip
def test_a_missing_value_is_one_sentence(ask, message):
    keys = mx.zeros((1, H, 6, D))
    with pytest.raises(SnapKVError, match=message):
        ask(Entries(keys, keys))


def test_a_policys_name_must_be_unique():
    with pytest.raises(SnapKVError, match="can't be named 'tova': TOVA has"):
        type("Other", (Policy,), {"name": "tova"})


@pytest.mark.parametrize("schedule", ["once", "block"])
def test_a_policy_that_asks_for_everything_serves_a_whole_request(tokens, schedule):
    """The prompt is read in chunks. With schedule=block, entries are evicted during prompt and answer."""
    model, reports = make_llama(), []
    policy = Asking(budget=20, schedule=schedule, block=8, n_window=6)
    cache = make_prompt_cache(model)
    options = {"prompt_cache": cache, "on_report": reports.append, "prefill_step_size": 16}
    assert len(steps(model, tokens[:T], 20, policy=policy, **options)) == 20
    assert reports[0].compressed and reports[0].entries == 20
    assert all(c.size() <= 28 for c in cache)


@pytest.mark.parametrize("n_sink, n_bytes", [(0, 8 << 20), (9, 8 << 20), (4, 1)])
def test_expected_attention_equals_the_reference(n_sink, n_bytes, monkeypatch):
    in_blocks(monkeypatch, n_bytes)  # 1: blocks of 64 keys
    model = make_llama()
    attention = model.layers[0].self_attn
    attention.q_proj.weight = 4 * attention.q_proj.weight  # otherwise all weights are nearly equal
    (entries, _), (x, _), _ = read(model, n_sink)
    queries = heads(x, attention.q_proj.weight).reshape(H, GROUP, T, D)
    to_come = [rotated(np.eye(D)[None], [p] * D)[0].T for p in range(T, T + 512)]
    scores = np.asarray(ExpectedAttention(n_sink=n_sink).score(entries))
    for head in range(H):
        states = entries.keys[0, head], entries.values[0, head]
        expected = reference.expected_attention(*states, queries[head], to_come, n_sink, D**-0.5)
        assert np.allclose(scores[0, head, n_sink:], np.log(expected), atol=1e-4)
    assert scores[0, :, :n_sink].min(initial=np.inf) > scores[0, :, n_sink:].max()


def test_weights_too_small_for_float32_still_differ():
    model = make_llama()
    attention = model.layers[0].self_attn
    attention.q_proj.weight = 400 * attention.q_proj.weight
    scores = ExpectedAttention().score(read(model, 4)[0][0])
    assert len(set(scores[0, 0, 4:].tolist())) == T - 4 and scores.min().item() < -100


def test_an_answers_queries_are_neither_captured_nor_added_to_the_statistics(tokens):
    model, policy = make_llama(), ExpectedAttention(budget=40, block=16, n_window=8)
    cache = make_prompt_cache(model)
    assert len(steps(model, tokens[:80], 40, policy=policy, prompt_cache=cache)) == 40
    assert not policy.observes_answer
    assert cache[0].moments.n_counted == 80 - policy.n_sink


def test_a_later_turn_reads_tokens_before_an_eviction_that_needs_statistics(tokens):
    """The statistics of a turn's queries don't exist before its first tokens have been read."""
    model = make_llama()
    cache = make_prompt_cache(model)
    model(tokens[None, :60], cache=cache)
    policy = ExpectedAttention(budget=40, block=16, n_window=8)
    plan = plan_request(model, CompressionConfig(Compress(policy), turns=True), 20, cache)
    request = Request(model, plan, cache)
    with request.recording():
        for part in (tokens[60:64], tokens[64:80]):
            model(part[None], cache=request.caches)
    report = request.compress()
    assert report.entries == 40 and all(c.offset == 80 for c in cache)
