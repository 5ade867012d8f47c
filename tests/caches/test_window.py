"""The cache of a fixed shape, against dense attention, and against a simulation that holds lists of tokens."""

import mlx.core as mx
import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.base import scaled_dot_product_attention
from request_helpers import in_order

from mlx_snapkv import KeyDiff, SnapKVCache, SnapKVError

H, D = 2, 32


def row(t):
    """The key (and value) of the token at position `t`, told apart by its content."""
    return mx.array(np.random.default_rng(t).normal(size=(1, H, 1, D)).astype(np.float32))


def rows(positions):
    return mx.concatenate([row(t) for t in positions], axis=2)


def make_cache(pinned=(0, 1, 5), window=4, offset=20, **options):
    keys = rows([*pinned, *range(offset - window, offset)])
    positions = mx.broadcast_to(mx.array(pinned, mx.uint32), (1, H, len(pinned)))
    return SnapKVCache(keys, keys + 1, positions, offset=offset, n_window=window, **options)


def feed(cache, L):
    """Attend like a model does: mask first, then update; the outputs `(n_heads, L, D)` of L new tokens."""
    new = rows(range(cache.offset, cache.offset + L))
    mask = cache.make_mask(L)
    keys, values = cache.update_and_fetch(new, new + 1)
    queries = mx.repeat(new, 2, axis=1)
    return scaled_dot_product_attention(queries, keys, values, cache, 0.5, mask)[0]


def assert_consistent(cache):
    for position, key in zip(cache.positions[0, 0].tolist(), np.asarray(cache.keys[0, 0])):
        assert np.array_equal(key, row(position)[0, 0, 0])


def test_many_decoded_tokens_keep_shape_and_buffer():
    cache = make_cache(window=16, offset=100)
    feed(cache, 1)
    mx.eval(cache.state)

    def address():
        return np.array(cache.keys, copy=False).__array_interface__["data"][0]

    shape, first = cache.keys.shape, address()
    for _ in range(300):
        mx.eval(feed(cache, 1), cache.state)
        assert address() == first and cache.keys.shape == cache.values.shape == shape
    assert_consistent(cache)


@settings(max_examples=60)
@given(
    window=st.integers(1, 6),
    pinned=st.integers(0, 4),
    updates=st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), min_size=1, max_size=6),
)
def test_any_updates_and_rewinds_equal_dense_attention(window, pinned, updates):
    """Each token sees the pinned rows and the last `window` tokens, itself included, whatever came before."""
    offset = 20
    cache = make_cache(pinned=tuple(range(pinned)), window=window, offset=offset)
    for L, back in updates:
        start = cache.offset
        out = feed(cache, L)
        everything = list(range(start + L))
        keys = np.asarray(rows(everything)[0], np.float64)
        queries = np.repeat(keys[:, start:], 2, axis=0)
        visible = np.array(
            [[r < pinned or (r >= offset - window and i - window < r <= i) for r in everything]
             for i in range(start, start + L)]
        )  # fmt: skip
        expected = reference.attention(queries, keys, keys + 1, visible, 0.5)
        assert np.allclose(out, expected, atol=1e-5)
        cache.trim(min(back, L))
        assert_consistent(cache)


def test_mask_is_a_string_or_none_where_that_is_exact():
    cache = make_cache(window=8)
    assert cache.make_mask(1) is None
    assert cache.make_mask(2) is not None and cache.make_mask(2) != "causal"
    young = SnapKVCache(rows([0, 1, 2]), rows([0, 1, 2]), mx.zeros((1, H, 1)), offset=3, n_window=8)
    assert young.make_mask(6) == "causal"
    assert young.make_mask(6, return_array=True).shape == (6, 9)
    assert young.make_mask(7) != "causal"
    with pytest.raises(SnapKVError, match="sliding-window"):
        cache.make_mask(2, window_size=4)


def test_bookkeeping_mlx_lm_relies_on():
    cache = make_cache()
    assert not cache.empty() and not cache.is_trimmable()
    assert cache.nbytes == 2 * 1 * H * 7 * D * 4
    assert cache.keys_and_values() == (cache.keys, cache.values)
    for name in ("bits", "to_quantized", "__len__", "__bool__"):
        assert not hasattr(cache, name)


@pytest.mark.parametrize("n_pin, offset, n_window", [(3, 3, 0), (1, 3, 1), (1, 2, 2), (4, 9, 2)])
def test_impossible_shapes_are_refused(n_pin, offset, n_window):
    held = rows([0, 1, 2])
    with pytest.raises(SnapKVError, match=f"don't hold {n_pin} pinned entries and a window"):
        SnapKVCache(held, held, mx.zeros((1, H, n_pin)), offset=offset, n_window=n_window)


# With a policy, the rows are chosen again every `PERIOD` tokens.
N_SINK, PINNED, N_WINDOW, OFFSET, PERIOD = 2, (0, 1, 5, 9, 11, 20), 8, 40, 4


def choosing(reserved=()):
    marks = mx.array([[[p in (0, 1, *reserved) for p in PINNED]] * H])
    return make_cache(PINNED, N_WINDOW, OFFSET, policy=KeyDiff(), block=PERIOD, reserved=marks)


class Simulation:
    """One head: the tokens it holds, in the order in which they will go, and KeyDiff's score in float64."""

    def __init__(self, head, reserved):
        self.head, self.reserved = head, list(reserved)
        self.pinned, self.window = list(PINNED), list(range(OFFSET - N_WINDOW, OFFSET))
        self.since = 0

    def step(self, position):
        if self.since == PERIOD:
            self.choose()
        self.window = [*self.window[1:], position]
        self.since += 1

    def choose(self):
        held = sorted(self.pinned + self.window)
        recent = held[len(held) - (N_WINDOW - PERIOD) :]
        keys = np.array(rows(held)[0, self.head], np.float64)
        keys /= np.linalg.norm(keys, axis=1, keepdims=True)
        anchor = keys.mean(axis=0)
        likeness = dict(zip(held, keys @ anchor / np.linalg.norm(anchor)))
        free = [p for p in held[N_SINK : -len(recent)] if p not in self.reserved]
        n_best = len(PINNED) - N_SINK - len(self.reserved)
        best = sorted(free, key=likeness.__getitem__)[:n_best]
        self.pinned = sorted(held[:N_SINK] + best + self.reserved)
        self.window = sorted(set(held) - set(self.pinned) - set(recent)) + recent
        self.since = 0


@pytest.mark.parametrize("reserved", [(), (5, 20), PINNED[N_SINK:]])
@pytest.mark.parametrize("sizes", [[1], [3, 1, 4, 2, 2, 1]])
def test_it_holds_what_the_simulation_holds(reserved, sizes):
    """However tokens come that fit in; the reserved entries survive any number of choices, and the shape stays."""
    cache, alone = choosing(reserved), choosing(reserved)
    simulations = [Simulation(head, reserved) for head in range(H)]
    for n in sizes * (60 // sum(sizes)):
        n = int(min(n, cache.room or PERIOD))
        one_by_one = [feed(alone, 1) for _ in range(n)]
        assert mx.allclose(feed(cache, n), mx.concatenate(one_by_one, axis=1), atol=1e-5)
        for position in range(cache.offset - n, cache.offset):
            for simulation in simulations:
                simulation.step(position)
    expected = [sorted(s.pinned + s.window) for s in simulations]
    keys, _, positions = in_order(alone)
    assert positions[0].tolist() == expected and alone.size() == len(PINNED) + N_WINDOW
    for head in range(H):
        assert mx.array_equal(keys[0, head], rows(expected[head])[0, head])
    feed(cache, 1), feed(alone, 1)  # pending tokens are in their places then
    assert mx.array_equal(in_order(cache)[2], in_order(alone)[2])
