"""The cache of a fixed shape, against dense attention, and against a simulation that holds lists of tokens."""

import mlx.core as mx
import numpy as np
import pytest
import reference
from cache_kinds import N_WINDOW, PINNED, SCALE, START, H, block, feed, rows, window
from hypothesis import given, settings
from hypothesis import strategies as st
from request_helpers import in_order

from mlx_snapkv import KeyDiff, SnapKVCache, SnapKVError


def assert_consistent(cache):
    every, positions = rows(0, cache.offset)[0], cache.positions[..., None].astype(mx.int32)
    held, _ = cache.keys_and_values()
    assert mx.array_equal(held, mx.take_along_axis(every, positions, axis=2))


def test_many_decoded_tokens_keep_shape_and_buffer():
    cache, found = window(), set()
    for _ in range(300):
        mx.eval(feed(cache, 1), cache.state)
        address = np.array(cache.keys, copy=False).ctypes.data
        found.add((address, cache.keys.shape, cache.values.shape))
    assert len(found) == 1
    assert_consistent(cache)


@settings(max_examples=60)
@given(
    n_window=st.integers(1, 6),
    n_pin=st.integers(0, 4),
    updates=st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), min_size=1, max_size=6),
)
def test_any_updates_and_rewinds_equal_dense_attention(n_window, n_pin, updates):
    """Each token sees the pinned rows and the last `n_window` tokens, itself included, whatever came before."""
    cache = window(n_window=n_window, pinned=[*range(n_pin)])
    for L, back in updates:
        start = cache.offset
        out = feed(cache, L)[0]
        keys, values, queries = (np.asarray(x[0], np.float64) for x in rows(0, start + L))
        every, own = np.arange(start + L), np.arange(start, start + L)[:, None]
        recent = (every >= START - n_window) & (own - n_window < every) & (every <= own)
        visible = (every < n_pin) | recent
        expected = reference.attention(queries[:, start:], keys, values, visible, SCALE)
        assert np.allclose(out, expected, atol=1e-5)
        cache.trim(min(back, L))
        assert_consistent(cache)


def test_mask_is_a_string_or_none_where_that_is_exact():
    cache, young = window(), window(n_window=N_WINDOW + 3)
    assert cache.make_mask(1) is None
    assert cache.make_mask(2) is not None and cache.make_mask(2) != "causal"
    assert young.make_mask(3) == "causal" and young.make_mask(4) != "causal"
    assert young.make_mask(3, return_array=True).shape == (3, len(PINNED) + N_WINDOW + 3)
    for compressed in (cache, block(KeyDiff())):
        with pytest.raises(SnapKVError, match="sliding-window"):
            compressed.make_mask(2, window_size=4)
    for name in ("bits", "to_quantized", "__len__", "__bool__"):  # mlx-lm looks for these
        assert not hasattr(cache, name)


@pytest.mark.parametrize("n_pin, offset, n_window", [(3, 3, 0), (1, 3, 1), (1, 2, 2), (4, 9, 2)])
def test_impossible_shapes_are_refused(n_pin, offset, n_window):
    held = rows(0, 3)[0]
    with pytest.raises(SnapKVError, match=f"don't hold {n_pin} pinned entries and a window"):
        SnapKVCache(held, held, mx.zeros((1, H, n_pin)), offset=offset, n_window=n_window)


# With a policy, the rows are chosen again every `PERIOD` tokens.
N_SINK, PERIOD = 2, 4


def choosing(reserved=()):
    marks = mx.array([[[p in (0, 1, *reserved) for p in PINNED]] * H])
    return window(KeyDiff(), block=PERIOD, reserved=marks)


class Simulation:
    """One head: the tokens it holds, in the order in which they will go, and KeyDiff's scores."""

    def __init__(self, head, reserved):
        self.head, self.reserved = head, list(reserved)
        self.pinned, self.window = list(PINNED), list(range(START - N_WINDOW, START))
        self.since = 0

    def step(self, position):
        if self.since == PERIOD:
            self.choose()
        self.window = [*self.window[1:], position]
        self.since += 1

    def choose(self):
        held = sorted(self.pinned + self.window)
        recent = held[len(held) - (N_WINDOW - PERIOD) :]
        keys = np.array(rows(0, held[-1] + 1)[0][0, self.head])[held]
        scores = dict(zip(held, reference.keydiff(keys, "mean", "cosine")))
        free = [p for p in held[N_SINK : -len(recent)] if p not in self.reserved]
        n_best = len(PINNED) - N_SINK - len(self.reserved)
        best = sorted(free, key=scores.__getitem__, reverse=True)[:n_best]
        self.pinned = sorted(held[:N_SINK] + best + self.reserved)
        self.window = sorted(set(held) - set(self.pinned) - set(recent)) + recent
        self.since = 0


@pytest.mark.parametrize("reserved", [(), (5, 11), PINNED[N_SINK:]])
@pytest.mark.parametrize("sizes", [[1], [3, 1, 4, 2, 2, 1]])
def test_it_holds_what_the_simulation_holds(reserved, sizes):
    """However tokens come that fit in; the reserved entries survive any number of choices, and the shape stays."""
    cache, alone = choosing(reserved), choosing(reserved)
    simulations = [Simulation(head, reserved) for head in range(H)]
    for n in sizes * (60 // sum(sizes)):
        n = int(min(n, cache.room or PERIOD))
        one_by_one = [feed(alone, 1) for _ in range(n)]
        assert mx.allclose(feed(cache, n), mx.concatenate(one_by_one, axis=2), atol=1e-5)
        for position in range(cache.offset - n, cache.offset):
            for simulation in simulations:
                simulation.step(position)
    expected = [sorted(s.pinned + s.window) for s in simulations]
    assert in_order(alone)[2][0].tolist() == expected
    assert alone.size() == len(PINNED) + N_WINDOW
    assert_consistent(alone)
    feed(cache, 1), feed(alone, 1)  # pending tokens are in their places then
    assert mx.array_equal(in_order(cache)[2], in_order(alone)[2])
