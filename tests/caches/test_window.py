import mlx.core as mx
import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_snapkv import SnapKVCache, SnapKVError

H, D = 2, 4


def row(t):
    """The key (and value) of the token at position `t`, told apart by its content."""
    return mx.array(np.random.default_rng(t).normal(size=(1, H, 1, D)).astype(np.float32))


def rows(positions):
    return mx.concatenate([row(t) for t in positions], axis=2)


def make_cache(pinned=(0, 1, 5), window=4, offset=20):
    kept = [*pinned, *range(offset - window, offset)]
    positions = mx.broadcast_to(mx.array(pinned, mx.uint32), (1, H, len(pinned)))
    keys = rows(kept)
    return SnapKVCache(keys, keys + 1, positions, offset=offset, n_window=window)


def feed(cache, L):
    """Attend like a model does: mask first, then update; the outputs `(n_heads, L, D)` of L new tokens."""
    new = rows(range(cache.offset, cache.offset + L))
    mask = cache.make_mask(L)
    keys, values = cache.update_and_fetch(new, new + 1)
    queries = mx.repeat(new, 2, axis=1) * 3
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.5, mask=mask)[0]


def contents(cache):
    """{original position: key row} of every physical row of head 0, as the positions property tells them."""
    return dict(zip(cache.positions[0, 0].tolist(), np.asarray(cache.keys[0, 0])))


def assert_consistent(cache):
    for position, key in contents(cache).items():
        assert np.array_equal(key, row(position)[0, 0, 0])


def test_a_decoded_token_overwrites_the_oldest_window_row():
    cache = make_cache(pinned=(0, 7), window=3, offset=20)
    assert cache.positions[0, 0].tolist() == [0, 7, 17, 18, 19]
    feed(cache, 1)
    assert cache.positions[0, 0].tolist() == [0, 7, 20, 18, 19]
    feed(cache, 1)
    assert cache.positions[0, 0].tolist() == [0, 7, 20, 21, 19]
    assert (cache.offset, cache.size()) == (22, 5)
    assert_consistent(cache)


def test_1000_decoded_tokens_keep_shape_and_buffer():
    cache = make_cache(window=16, offset=100)
    feed(cache, 1)
    mx.eval(cache.state)

    def address():
        return np.array(cache.keys, copy=False).__array_interface__["data"][0]

    shape, first, seen = cache.keys.shape, address(), set()
    for _ in range(1000):
        mx.eval(feed(cache, 1), cache.state)
        seen.add(address())
        assert cache.keys.shape == cache.values.shape == shape
    assert seen == {first}
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
        queries = np.repeat(keys[:, start:], 2, axis=0) * 3
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
    assert not cache.empty()
    assert not cache.is_trimmable()  # mlx-lm takes true for any number of tokens
    assert cache.nbytes == 2 * 1 * H * 7 * D * 4
    assert cache.keys_and_values() == (cache.keys, cache.values)
    assert not hasattr(cache, "bits") and not hasattr(cache, "to_quantized")
    assert not hasattr(cache, "__len__") and not hasattr(cache, "__bool__")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"n_window": 0}, "n_window must be at least 1"),
        ({"n_window": 1}, "don't hold 1 pinned entries"),
        ({"offset": 2}, "offset must be at least"),
    ],
)
def test_impossible_shapes_are_refused(changes, message):
    with pytest.raises(SnapKVError, match=message):
        SnapKVCache(
            rows([0, 1, 2]),
            rows([0, 1, 2]),
            mx.zeros((1, H, 1)),
            **{"offset": 3, "n_window": 2} | changes,
        )
