"""Position compaction: entries brought nearer, and votes of queries that are turned instead of the entries."""

import mlx.core as mx
import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache, make_prompt_cache
from model_configs import make_model

from mlx_snapkv.caches.compaction import AFTER, Compaction, looked_up, squeezed
from mlx_snapkv.caches.full_view import FullView
from mlx_snapkv.caches.layers import attention_layers
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
    found.update_and_fetch(*mx.random.normal((2, 1, 2, T, 16), key=mx.random.key(3)))
    return found


@pytest.fixture
def view(layer, cache, length):
    return FullView([MemoryStore(cache=cache)], layer, Compaction(length))


def at(positions):
    """The same positions in every head."""
    return mx.broadcast_to(mx.array(positions, mx.uint32), (1, 2, len(positions)))


def brought_near(layer, keys, start):
    """The keys of far pages, turned on to where their page ends just before the question."""
    n_far = -(-(start - LENGTH) // PAGE) * PAGE
    ends = np.arange(T) // PAGE * PAGE + PAGE - 1
    steps = np.where(np.arange(T) < n_far, start - AFTER - ends, 0)
    return layer.turn(keys, mx.broadcast_to(mx.array(steps), (1, 2, T)))


@pytest.mark.parametrize("length", [LENGTH, T])
def test_votes_are_those_of_far_keys_brought_near(view, layer, cache, length):
    places, keys = range(T - N, T), cache.keys[:, :, :T]
    queries = mx.random.normal((1, 4, N, 16), key=mx.random.key(4))
    entries = view.voted_by(Queries(queries, places, scale=0.25))
    near = reference.votes(queries, brought_near(layer, keys, T - N), places, 0.25)
    as_it_is = reference.votes(queries, keys, places, 0.25)
    assert np.abs(as_it_is - near).max() > 1e-2
    by_head = entries.attention.sum(axis=2).reshape(1, 2, 2, T).mean(axis=2)
    for found in (entries.votes, by_head):
        wanted = as_it_is if length == T else near
        assert np.abs(np.array(found) - wanted).max() < 1e-4


@pytest.mark.parametrize("length", [LENGTH, T])
def test_far_entries_as_queries_vote_for_them_and_read_them(view, layer, cache, length):
    """A logit of a far key, turned, is that of the query turned for its page; it is read from its place in line."""
    places = at([0, 63, 64, 500, 767, 768, 999])
    seen, line, plain = (
        view.seen_from(places, T - N),
        view.lined_up(places, T, 900),
        view.gather(places),
    )
    near = in_line = plain.keys
    if length < T:
        near = mx.take(brought_near(layer, cache.keys[:, :, :T], T - N), places[0, 0], axis=2)
        in_line = layer.turn(in_line, mx.arange(893, 900) - places.astype(mx.int32))
    assert mx.allclose(seen.keys, near, atol=1e-4) and mx.array_equal(line.keys, in_line)
    for found in (seen, line, plain):
        assert mx.array_equal(found.values, mx.take(cache.values, places[0, 0], axis=2))


def test_entries_move_when_the_next_tokens_would_be_too_far(layer):
    keys, values = mx.random.normal((2, 1, 2, 5, 16))
    entries = Entries(keys, values, given_positions=at([0, 1, 100, 101, 230]), layer=layer)
    same, near = Compaction(LENGTH).nearer(entries, 231, 25)
    assert same is entries and near == Compaction(LENGTH)
    moved, near = near.nearer(entries, 231, 26)
    assert near.farthest == 231 - (LENGTH + 5) // 2
    assert 231 - moved.rotations.min().item() <= (LENGTH + 5) // 2
    steps = moved.rotations.astype(mx.int32) - entries.positions.astype(mx.int32)
    assert mx.array_equal(moved.keys, layer.turn(entries.keys, steps))
    assert mx.array_equal(moved.values, entries.values)
    assert mx.array_equal(moved.positions, entries.positions)
    # Half of the room is free again.
    assert near.nearer(moved, 231 + 100, 20)[0] is moved
    twice, _ = near.nearer(moved, 231 + 200, 26)
    steps = twice.rotations.astype(mx.int32) - entries.positions.astype(mx.int32)
    assert mx.allclose(twice.keys, layer.turn(entries.keys, steps), atol=1e-4)
    assert twice is not moved


def nearer(positions, end, span):
    """Every gap is tried."""
    steps = np.diff([*positions, end])
    if steps.sum() > span:
        fits = [m for m in range(1, steps.max() + 1) if np.minimum(steps, m).sum() <= span]
        steps = np.minimum(steps, max(fits, default=1))
    return end - np.cumsum(steps[::-1])[::-1]


@given(
    st.lists(st.sets(st.integers(0, 400), min_size=5, max_size=5), min_size=1, max_size=3),
    st.integers(1, 80),
    st.integers(0, 500),
    st.sampled_from([0, 2**30]),  # of a billion tokens
)
def test_gaps_are_squeezed_as_the_reference_does(found, more, span, first):
    positions = np.array([[sorted(head) for head in found]]) + first
    end = int(positions.max()) + more
    new = np.array(squeezed(mx.array(positions.astype(np.uint32)), end, span))
    assert new.dtype == np.uint32
    for row, was in zip(new[0], positions[0]):
        assert row.tolist() == nearer(was, end, span).tolist()


@given(st.sets(st.integers(0, 60), min_size=1), st.lists(st.integers(0, 60), min_size=1))
def test_positions_are_looked_up(known, positions):
    table = mx.array(sorted(known), mx.uint32)[None, None]
    found = looked_up(mx.array(positions, mx.uint32)[None, None], table, table + 7)
    assert found.tolist() == [[[n + 7 * (n in known) for n in positions]]]
