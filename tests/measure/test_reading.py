"""A prefill shared by many policies gives each policy the same entries as its own prefill."""

import copy

import mlx.core as mx
import pytest
from model_configs import make_model
from request_helpers import assert_unpatched
from tiny_models import make_llama

from mlx_snapkv import Sparse, generate_step, prefill
from mlx_snapkv.caches.layers import attention_layers
from mlx_snapkv.errors import SnapKVError
from mlx_snapkv.measure import sparse_reading as module
from mlx_snapkv.measure.divergence import logits_after
from mlx_snapkv.measure.reading import read_once, shares_reading
from mlx_snapkv.measure.sparse_reading import read_for_sparse
from mlx_snapkv.planning.prompt_plan import reason_to_leave
from mlx_snapkv.planning.settings import resolve_compress

BASE = "snapkv:budget=56,n_sink=4,n_window=32,obs_window=8"
SNAPKV = f"{BASE},lookahead=4"
MANY = SNAPKV.replace("obs_window=8", "obs_window=48")  # more queries than forward pooling uses
SHARING = [
    SNAPKV,
    f"{BASE},lookahead=0",
    f"{BASE},lookahead=20,on_full=grow",
    f"{MANY},on_full=slide",
    "streaming_llm:budget=48,schedule=once",
    "expected_attention:budget=48,n_sink=16,schedule=once",
]
ALONE = [
    "h2o:budget=48,n_sink=2,schedule=once",
    "keydiff:budget=48,n_sink=2,block=16",
    f"h2o:budget=80,block=16 then {SNAPKV}",
]
TAIL = [7, 3, 60, 22, 1]  # shorter than obs_window: queries of the document vote, too


def policy_of(text):
    return resolve_compress(policy=text)


POLICIES = [policy_of(text) for text in SHARING + ALONE]


def assert_same_entries(model, cache, other, atol=1e-5):
    for layer in attention_layers(model, cache):
        ours, theirs = (layer.layer_cache_in(caches) for caches in (cache, other))
        a, b = ours.held(), theirs.held()
        assert ours.offset == theirs.offset and mx.array_equal(a.positions, b.positions)
        assert mx.allclose(a.keys, b.keys, atol=atol, rtol=atol)
        assert mx.allclose(a.values, b.values, atol=atol, rtol=atol)


def log_softmax(logits):
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


@pytest.fixture(scope="module")
def read():
    """Return a function of (model, tokens) that reads the document for all policies, without TAIL and then with it."""
    made = {}

    def get(model, tokens):
        if type(model) not in made:
            reading = read_once(model, tokens.tolist(), [None, *POLICIES], [TAIL])
            made[type(model)] = reading, reading.followed_by(TAIL)
        return made[type(model)]

    return get


NOT_TIMED = {"prefill_seconds": None, "selection_seconds": None, "attention_share": None}


@pytest.mark.parametrize("policy", SHARING + ALONE)
def test_a_shared_reading_keeps_what_prefill_keeps(tiny_model, tokens, read, policy):
    for reading in read(tiny_model, tokens):
        cache, report = reading.compress(policy_of(policy))
        own, wanted = prefill(tiny_model, reading.tokens, policy)
        assert_same_entries(tiny_model, cache, own)
        assert report.to_dict() | NOT_TIMED == wanted.to_dict() | NOT_TIMED
    if policy in SHARING:
        assert_continues_as_generate_step(tiny_model, reading, policy_of(policy))
    assert_unpatched()


@pytest.mark.parametrize("policy", SHARING[::2])
def test_a_shared_reading_equals_one_for_a_single_policy_bit_for_bit(
    tiny_model, tokens, read, policy
):
    chosen = policy_of(policy)
    alone = read_once(tiny_model, tokens.tolist(), [chosen], [TAIL])
    for mine, shared in zip((alone, alone.followed_by(TAIL)), read(tiny_model, tokens)):
        for answering in (False, True):
            (cache, _), (other, _) = (r.compress(chosen, answering) for r in (mine, shared))
            assert_same_entries(tiny_model, cache, other, atol=0)
            assert mx.array_equal(
                logits_after(tiny_model, cache, TAIL), logits_after(tiny_model, other, TAIL)
            )
        assert mx.array_equal(mine.next_logprobs, shared.next_logprobs)
        assert mine.answer(6) == shared.answer(6)


def assert_continues_as_generate_step(model, reading, policy, n=24):
    """Assert that after the compression, tokens and log-probabilities equal those of generate_step."""
    steps = generate_step(mx.array(reading.tokens), model, policy=policy, max_tokens=n)
    answer, logprobs = zip(*steps)
    cache, _ = reading.compress(policy, answering=True)
    fed = attention_layers(model, cache)[0].layer_cache_in(cache).offset
    of_full = fed - len(reading.tokens) + 1
    assert of_full == max(1, policy.decode_policy.lookahead) + 1
    assert list(answer[:of_full]) == reading.answer(of_full)
    found = log_softmax(logits_after(model, cache, [*reading.tokens, *answer][fed:-1]))
    assert mx.allclose(found, mx.stack(logprobs[of_full:]), atol=1e-4)


@pytest.mark.parametrize(
    "model_type",
    ["gemma3_text", "gemma3n", "gemma2", "deepseek_v3", "falcon_h1", "gpt_oss", "plamo"],
)
def test_a_shared_reading_works_with_every_kind_of_layer(tokens, model_type):
    """Sliding windows, shared entries, capped logits, latents, linear states, sinks and tiled heads."""
    model = make_model(model_type)
    policies = [policy_of(f"{BASE},{x}") for x in ("lookahead=9", "lookahead=0")]
    reading = read_once(model, tokens.tolist(), policies, [TAIL]).followed_by(TAIL)
    for policy in policies:
        cache, _ = reading.compress(policy)
        assert_same_entries(model, cache, prefill(model, reading.tokens, policy)[0], atol=1e-4)
        assert_continues_as_generate_step(model, reading, policy, 14)


JUDGED = [
    (None, f"{SNAPKV},on_full=grow"),
    (None, f"{SNAPKV},on_full=slide"),
    (None, "keydiff:budget=48,n_sink=2,block=16"),
    # These models have layers that share a mask or read each other's entries.
    *((name, f"{SNAPKV},on_full=slide") for name in ("gemma2", "deepseek_v3", "gemma3n")),
]


@pytest.mark.parametrize("model_type, policy", JUDGED)
def test_logits_of_one_call_equal_logits_token_by_token(tokens, model_type, policy):
    """There are more tokens than fit into any window."""
    model = make_model(model_type) if model_type else make_llama(num_hidden_layers=3)
    known = [*TAIL, *tokens.tolist()[: 45 if model_type else 80]]
    cache, _ = prefill(model, tokens, policy_of(policy))
    other = copy.deepcopy(cache)
    together = logits_after(model, cache, known)
    alone = mx.concatenate([logits_after(model, other, [token]) for token in known])
    assert mx.allclose(together, alone, atol=1e-4)
    # Entries that still wait outside a window enter it with the next token.
    assert mx.allclose(*(logits_after(model, c, [5]) for c in (cache, other)), atol=1e-4)
    assert_same_entries(model, cache, other, atol=1e-3)


def test_an_uncompressed_policy_has_a_reason_and_an_unknown_policy_is_refused(tiny_model, tokens):
    roomy = policy_of("streaming_llm:budget=1000,schedule=once")
    reading = read_once(tiny_model, tokens.tolist(), [roomy, policy_of(SNAPKV)])
    cache, report = reading.compress(roomy)
    assert report.reason == reason_to_leave(roomy, tokens.size, None)
    assert mx.array_equal(
        logits_after(tiny_model, cache, TAIL), logits_after(tiny_model, reading.full_cache(), TAIL)
    )
    with pytest.raises(SnapKVError, match="was not read for snapkv"):
        reading.compress(policy_of(f"{BASE},lookahead=0"))
    with pytest.raises(SnapKVError, match="was not read for h2o"):
        reading.compress(policy_of(ALONE[0]), answering=True)
    assert not any(shares_reading(policy_of(text)) for text in ALONE)


@pytest.mark.parametrize("later", [[], TAIL, TAIL * 5])
def test_sparse_attention_continues_from_the_full_cache(tiny_model, tokens, later, monkeypatch):
    """The answers equal those after a separate reading of the prompt."""
    sparse = Sparse(budget=56, n_sink=4, n_window=16, when="always")
    reading = read_once(tiny_model, tokens.tolist())
    cache, report = read_for_sparse(reading, sparse, later)
    monkeypatch.setattr(module, "starts_from_full_cache", lambda setting: False)
    other, other_report = read_for_sparse(reading, sparse, later)
    assert report.compressed and report.prompt_tokens == other_report.prompt_tokens
    assert report.entries == other_report.entries == 56
    found, wanted = (logits_after(tiny_model, each, [5, 9, 2]) for each in (cache, other))
    assert mx.allclose(found, wanted, atol=1e-3)
    assert mx.array_equal(
        logits_after(tiny_model, reading.full_cache(), [5]),
        logits_after(tiny_model, read_once(tiny_model, tokens.tolist()).full_cache(), [5]),
    )
