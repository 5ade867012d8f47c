"""Entries pulled together, and votes of queries that are turned instead of the entries."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache
from model_configs import make_model

from mlx_snapkv.caches.compaction import AFTER, Compaction
from mlx_snapkv.caches.layers import attention_layers
from mlx_snapkv.caches.recollection import Recollection
from mlx_snapkv.caches.stores import MemoryStore
from mlx_snapkv.entries.entries import Entries
from mlx_snapkv.entries.queries import Queries

LENGTH, T, N, PAGE = 256, 1000, 5, 64


@pytest.fixture(scope="module")
def layer():
    model = make_model("llama")
    return attention_layers(model, make_prompt_cache(model))[0]


@pytest.fixture(scope="module")
def cache():
    found = KVCache()
    keys, values = mx.random.normal((2, 1, 2, T, 16), key=mx.random.key(3))
    found.update_and_fetch(keys, values)
    return found


def brought_near(layer, keys, start):
    """The keys of far pages, turned on to where their page ends just before the question."""
    n_far = -(-(start - LENGTH) // PAGE) * PAGE
    place = np.arange(T)
    ends = place // PAGE * PAGE + PAGE - 1
    steps = np.where(place < n_far, start - AFTER - ends, 0)
    assert steps.min() >= 0 and steps[n_far:].max(initial=0) == 0 and steps[0] > 0
    return layer.turn(keys, mx.broadcast_to(mx.array(steps), (1, 2, T)))


def softmax_votes(keys, queries, places):
    """Float64, query by query, two query heads for each of keys."""
    votes = np.zeros((2, T))
    for head in range(4):
        for i, place in enumerate(places):
            logits = 0.25 * np.array(keys[0, head // 2], np.float64) @ np.array(queries[0, head, i])
            weights = np.exp(logits - logits.max()) * (np.arange(T) <= place)
            votes[head // 2] += weights / weights.sum() / 2
    return votes


@pytest.mark.parametrize("observed_heads", ["votes", "attention"])
def test_votes_are_those_of_far_keys_brought_near(layer, cache, observed_heads):
    places = range(T - N, T)
    queries = mx.random.normal((1, 4, N, 16), key=mx.random.key(4))
    observed = Queries(queries, places, scale=0.25)
    entries = Recollection([MemoryStore(cache=cache)], layer, Compaction(LENGTH)).voted_by(observed)
    found = entries.votes
    if observed_heads == "attention":
        found = entries.attention.sum(axis=2).reshape(1, 2, 2, T).mean(axis=2)
    wanted = softmax_votes(brought_near(layer, cache.keys[:, :, :T], T - N), queries, places)
    assert np.abs(np.array(found[0]) - wanted).max() < 1e-4
    as_it_is = softmax_votes(cache.keys[:, :, :T], queries, places)
    assert np.abs(as_it_is - wanted).max() > 1e-2


def test_entries_are_seen_as_queries_vote_for_them(layer, cache):
    """A logit of a far key, turned, is that of the query turned for its page."""
    start = T - N
    everything = Recollection([MemoryStore(cache=cache)], layer, Compaction(LENGTH))
    places = mx.broadcast_to(mx.array([0, 63, 64, 500, 767, 768, 999], mx.uint32), (1, 2, 7))
    wanted = mx.take(brought_near(layer, cache.keys[:, :, :T], start), places[0, 0], axis=2)
    seen = everything.seen_from(places, start)
    assert mx.allclose(seen.keys, wanted, atol=1e-4)
    assert mx.array_equal(seen.values, mx.take(cache.values, places[0, 0], axis=2))


def test_within_the_length_queries_vote_as_they_are(layer, cache):
    observed = Queries(mx.random.normal((1, 4, N, 16)), range(T - N, T), scale=0.25)
    near = Recollection([MemoryStore(cache=cache)], layer, Compaction(T)).voted_by(observed).votes
    assert mx.array_equal(
        near, Recollection([MemoryStore(cache=cache)], layer).voted_by(observed).votes
    ).item()


def entries_at(layer, positions):
    keys, values = mx.random.normal((2, 1, 2, len(positions), 16))
    given = mx.broadcast_to(mx.array(positions, mx.uint32), (1, 2, len(positions)))
    return Entries(keys, values, given_positions=given, layer=layer)


def test_entries_move_when_the_next_tokens_would_be_too_far(layer):
    entries = entries_at(layer, [0, 1, 100, 101, 230])
    same, pull = Compaction(LENGTH).nearer(entries, 231, 25)
    assert same is entries and pull == Compaction(LENGTH)
    moved, pull = pull.nearer(entries, 231, 26)
    assert pull.farthest == 231 - (LENGTH + 5) // 2
    assert 231 - moved.rotations.min().item() <= (LENGTH + 5) // 2
    steps = moved.rotations.astype(mx.int32) - entries.positions.astype(mx.int32)
    assert mx.array_equal(moved.keys, layer.turn(entries.keys, steps)).item()
    assert mx.array_equal(moved.values, entries.values).item()
    assert mx.array_equal(moved.positions, entries.positions).item()
    # Half of the room is free again.
    assert pull.nearer(moved, 231 + 100, 20)[0] is moved
    assert pull.nearer(moved, 231 + 200, 26)[0] is not moved


def test_what_is_moved_twice_is_as_if_moved_once(layer):
    entries = entries_at(layer, [0, 1, 100, 101, 230])
    once, pull = Compaction(LENGTH).nearer(entries, 300)
    twice, _ = pull.nearer(once, 600)
    steps = twice.rotations.astype(mx.int32) - entries.positions.astype(mx.int32)
    assert mx.allclose(twice.keys, layer.turn(entries.keys, steps), atol=1e-4).item()
