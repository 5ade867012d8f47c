"""A prompt and a policy keep the same entries, whichever function or command is used."""

import random

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from request_helpers import filled_cache

from mlx_snapkv import Conversation, compress_prompt_cache, generate_step, prefill, stream_generate
from mlx_snapkv.demo.questions import make_haystack
from mlx_snapkv.engine import compress

FEW = "snapkv:budget=56,n_sink=4,n_window=32,obs_window=8"
SNAPKV = f"{FEW},lookahead=4"
MANY = "snapkv:budget=56,lookahead=4"  # more voting queries than entries in the window
VOTING = [SNAPKV, MANY]
BLOCK = [
    "keydiff:budget=48,n_sink=2,block=16",
    "h2o:budget=48,n_sink=2,block=16",
    f"{SNAPKV},schedule=block,block=16",
    f"keydiff:budget=80,block=16 then {MANY}",
]


@pytest.fixture
def kept(monkeypatch):
    """Return a function that runs a request, and returns the kept positions `(B, H, n)` and keys per layer."""
    layers = []
    original = compress.make_decode_cache

    def watched(layer, entries, *args):
        layers.append((np.array(entries.positions), np.array(entries.keys.astype(mx.float32))))
        return original(layer, entries, *args)

    monkeypatch.setattr(compress, "make_decode_cache", watched)

    def run(request):
        layers.clear()
        request()
        assert layers, "nothing was compressed"
        return list(layers)

    return run


def assert_same_entries(found, wanted, atol=1e-5):
    assert len(found) == len(wanted)
    for (positions, keys), (others, theirs) in zip(found, wanted):
        assert np.array_equal(positions, others)
        assert np.allclose(keys, theirs, atol=atol)


@pytest.fixture
def stepped(kept, tiny_model, tokens):
    """Return a function that takes a policy, and returns the entries that generate_step keeps."""
    return lambda policy: kept(
        lambda: list(generate_step(tokens, tiny_model, max_tokens=8, policy=policy))
    )


@pytest.mark.parametrize("policy, step", [*((p, 5) for p in VOTING), *((p, 500) for p in BLOCK)])
def test_prefill_in_other_chunks_keeps_the_same_entries(
    kept, stepped, tiny_model, tokens, policy, step
):
    found = kept(lambda: prefill(tiny_model, tokens.tolist(), policy, prefill_step_size=step))
    assert_same_entries(found, stepped(policy))


@pytest.mark.parametrize("policy", VOTING)
def test_a_cache_filled_and_recorded_by_the_caller_keeps_the_same_entries(
    kept, stepped, tiny_model, tokens, policy
):
    policy = policy.replace("lookahead=4", "lookahead=0")
    plain, given = filled_cache(tiny_model, tokens)
    found = kept(lambda: compress_prompt_cache(tiny_model, plain, policy, queries=given))
    assert_same_entries(found, stepped(policy))


@pytest.fixture(scope="module")
def haystack(demo_llama):
    return make_haystack(demo_llama[1], random.Random(3), 3, 200)


@pytest.mark.parametrize(
    "policy, turns", [(MANY, 1), *((policy, 1) for policy in BLOCK), (SNAPKV, 1)]
)
def test_a_turn_keeps_the_entries_of_a_request_for_the_whole_chat(
    kept, demo_model, haystack, policy, turns
):
    """Messages are longer than the observation window, so only the turn's own queries vote."""
    document, facts = haystack
    talk = Conversation(*demo_model, policy=policy, max_tokens=8)
    talk.attach(document)
    for fact in facts[:turns]:
        found = kept(lambda fact=fact: list(talk.send(fact.question)))
    read = mx.array(talk.read[: talk.report.prompt_tokens])
    # Answers may end before the compression, so both must have the same length.
    options = {"prompt_cache": make_prompt_cache(demo_model[0]), "max_tokens": 8, "policy": policy}
    wanted = kept(lambda: list(stream_generate(*demo_model, read, **options)))
    assert_same_entries(found, wanted, atol=1e-4)
