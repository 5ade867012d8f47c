"""The compressed prompt's cache against dense attention over the tokens that each token must see."""

import mlx.core as mx
import numpy as np
import pytest
import reference
from cache_kinds import N_WINDOW, PINNED, SCALE, START, H, block, feed, rows, window
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_snapkv import KeyDiff, SnapKVCache, SnapKVError


def assert_consistent(cache):
    every, positions = rows(0, cache.offset)[0], cache.positions[..., None].astype(mx.int32)
    held, _ = cache.keys_and_values()
    assert mx.array_equal(held, mx.take_along_axis(every, positions, axis=2))


def test_a_ring_keeps_its_shape_and_buffer_over_many_tokens():
    cache, found = window(), set()
    for _ in range(300):
        mx.eval(feed(cache, 1), cache.state)
        address = np.array(cache.keys, copy=False).ctypes.data
        found.add((address, cache.keys.shape, cache.values.shape))
    assert len(found) == 1
    assert_consistent(cache)


def test_a_growing_window_is_written_in_place_and_rarely_reallocated():
    cache, found = window(n_window=None), set()
    held = cache.size()
    for _ in range(100):
        mx.eval(feed(cache, 1), cache.state)
        found.add(cache.keys.shape[2])
        assert cache.make_mask(1) is None and cache.make_mask(3) == "causal"
        assert cache.size() <= cache.keys.shape[2] <= max(held + 16, cache.size() * 9 / 8 + 16)
    assert cache.size() == held + 100 and len(found) <= 7
    assert_consistent(cache)


@settings(max_examples=60)
@given(
    n_window=st.one_of(st.integers(1, 6), st.none()),
    n_pin=st.integers(0, 4),
    updates=st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), min_size=1, max_size=6),
)
def test_any_updates_and_trims_equal_dense_attention(n_window, n_pin, updates):
    """Each token sees the pinned entries and the last `n_window` tokens, including itself."""
    cache = window(n_window=n_window, pinned=[*range(n_pin)])
    first = START - (cache.size() - n_pin)  # the window's first token
    for L, back in updates:
        start = cache.offset
        out = feed(cache, L)[0]
        keys, values, queries = (np.asarray(x[0], np.float64) for x in rows(0, start + L))
        every, own = np.arange(start + L), np.arange(start, start + L)[:, None]
        most = every.size if n_window is None else n_window
        recent = (every >= first) & (own - most < every) & (every <= own)
        visible = (every < n_pin) | recent
        expected = reference.attention(queries[:, start:], keys, values, visible, SCALE)
        assert np.allclose(out, expected, atol=1e-5)
        if cache.grows:
            assert cache.trim(min(back, L)) == min(back, L)
        assert_consistent(cache)


def test_a_mask_is_a_string_or_none_if_that_is_exact():
    cache, young = window(), window(n_window=N_WINDOW + 3)
    assert cache.make_mask(1) is None
    assert cache.make_mask(2) is not None and cache.make_mask(2) != "causal"
    assert young.make_mask(3) == "causal" and young.make_mask(4) != "causal"
    assert young.make_mask(3, return_array=True).shape == (3, len(PINNED) + N_WINDOW + 3)
    for compressed in (cache, block(KeyDiff())):
        with pytest.raises(SnapKVError, match="sliding-window"):
            compressed.make_mask(2, window_size=4)
    for name in ("bits", "to_quantized", "__len__", "__bool__"):  # mlx-lm checks for these names
        assert not hasattr(cache, name)


@pytest.mark.parametrize("n_pin, offset, n_window", [(3, 3, 0), (1, 3, 1), (1, 2, 2), (4, 9, 2)])
def test_impossible_shapes_are_refused(n_pin, offset, n_window):
    held = rows(0, 3)[0]
    with pytest.raises(SnapKVError, match=f"don't hold {n_pin} pinned entries and a window"):
        SnapKVCache(held, held, mx.zeros((1, H, n_pin)), offset=offset, n_window=n_window)
