"""A fixed shape whose rows are chosen again, against a simulation that holds whole lists of tokens."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.base import scaled_dot_product_attention
from request_helpers import in_order

from mlx_snapkv import KeyDiff, SnapKVCache
from mlx_snapkv.errors import TrimError

B, H, D = 1, 2, 32
N_SINK, N_PIN, N_WINDOW, OFFSET = 2, 6, 8, 40
PERIOD = N_WINDOW // 2


def token_rows(position):
    """Keys and values `(B, H, 1, D)` of the token at a position."""
    rng = np.random.default_rng(position)
    return [mx.array(rng.normal(size=(B, H, 1, D)).astype(np.float32)) for _ in range(2)]


def stacked(positions_by_head):
    """Keys and values of the tokens at these positions, which differ by head."""
    parts = [
        [token_rows(p)[part][:, h : h + 1] for p in positions]
        for part in range(2)
        for h, positions in enumerate(positions_by_head)
    ]
    heads = [mx.concatenate(part, axis=2) for part in parts]
    return [mx.concatenate(heads[part * H : (part + 1) * H], axis=1) for part in range(2)]


PINNED = [[0, 1, 5, 9, 11, 20], [0, 1, 3, 8, 17, 30]]
WINDOW = list(range(OFFSET - N_WINDOW, OFFSET))
RESERVED = [[5, 20], [3, 17]]
NONE: list[list[int]] = [[], []]
ALL = [pinned[N_SINK:] for pinned in PINNED]


def make(chooses=True, reserved=NONE, **options):
    keys, values = stacked([pinned + WINDOW for pinned in PINNED])
    how = options.get("quantization")
    if how is not None:
        keys, values = how.pack(keys), how.pack(values)
    if chooses:
        marks = [[p in (0, 1, *kept) for p in pinned] for pinned, kept in zip(PINNED, reserved)]
        options |= {"policy": KeyDiff(), "block": PERIOD, "reserved": mx.array([marks])}
    return SnapKVCache(
        keys, values, mx.array([PINNED], mx.uint32), offset=OFFSET, n_window=N_WINDOW, **options
    )


def feed(cache, start, n):
    rows = [token_rows(p) for p in range(start, start + n)]
    keys, values = (mx.concatenate([r[part] for r in rows], axis=2) for part in range(2))
    return cache.update_and_fetch(keys, values)


class Simulation:
    """One head: the tokens it holds, in the order in which they will go, and KeyDiff's score in float64."""

    def __init__(self, head, reserved=NONE):
        self.head, self.reserved = head, reserved[head]
        self.pinned, self.window = list(PINNED[head]), list(WINDOW)
        self.since = 0

    def step(self, position):
        if self.since == PERIOD:
            self.choose()
        self.window = [*self.window[1:], position]
        self.since += 1

    def choose(self):
        held = sorted(self.pinned + self.window)
        recent = held[len(held) - (N_WINDOW - PERIOD) :]
        keys = np.array([np.array(token_rows(p)[0])[0, self.head, 0] for p in held], np.float64)
        keys /= np.linalg.norm(keys, axis=1, keepdims=True)
        anchor = keys.mean(axis=0)
        likeness = dict(zip(held, keys @ anchor / np.linalg.norm(anchor)))
        middle = held[N_SINK : len(held) - len(recent)]
        free = [p for p in middle if p not in self.reserved]
        best = sorted(free, key=likeness.__getitem__)[: N_PIN - N_SINK - len(self.reserved)]
        best += self.reserved
        self.pinned = sorted(held[:N_SINK] + best)
        self.window = sorted(set(held) - set(self.pinned) - set(recent)) + recent
        self.since = 0


def assert_holds(cache, simulations):
    expected = [sorted(s.pinned + s.window) for s in simulations]
    keys, values, positions = in_order(cache)
    assert positions[0].tolist() == expected
    for found, wanted in zip((keys, values), stacked(expected)):
        assert mx.array_equal(found, wanted)
    assert cache.positions.shape == (B, H, cache.size())


@pytest.mark.parametrize("reserved", [NONE, RESERVED, ALL])
def test_it_holds_what_the_simulation_holds(reserved):
    """The reserved entries survive any number of choices, and the shape stays."""
    cache, simulations = make(reserved=reserved), [Simulation(h, reserved) for h in range(H)]
    for position in range(OFFSET, OFFSET + 60):
        for simulation in simulations:
            simulation.step(position)
        keys, _ = feed(cache, position, 1)
        assert keys.shape == (B, H, N_PIN + N_WINDOW, D) and cache.offset == position + 1
        assert_holds(cache, simulations)


@pytest.mark.parametrize("updates", [[3, 1, 4, 2, 2, 1, 1, 1, 4, 1], [1, 1, 2, 4, 3, 1, 4]])
def test_several_tokens_at_once_that_fit_in_are_as_one_by_one(updates):
    """Attention of every token over what its mask lets it see, and the rows held in the end."""
    cache, alone = make(), make()
    position = OFFSET
    for L in updates:
        if alone.room < L:
            with pytest.raises(AssertionError):  # such an update can't be exact, and is not
                assert cache.room >= L
            break
        queries = mx.random.normal((B, 2 * H, L, D), key=mx.random.key(position))
        mask = cache.make_mask(L)
        at_once = scaled_dot_product_attention(
            queries, *feed(cache, position, L), cache, scale=0.2, mask=mask
        )
        for i in range(L):
            one = scaled_dot_product_attention(
                queries[:, :, i : i + 1], *feed(alone, position + i, 1), alone, scale=0.2, mask=None
            )
            assert mx.allclose(one, at_once[:, :, i : i + 1], atol=1e-5)
        position += L


@pytest.mark.parametrize("reserved", [NONE, RESERVED])
@pytest.mark.parametrize("rejected", range(1, 6))
def test_a_choice_for_now_is_taken_back_with_the_tokens_before_it(rejected, reserved):
    """As a draft's check does: two tokens up to the choice, three after it, some of the five rejected."""
    cache, simulations = make(reserved=reserved), [Simulation(h, reserved) for h in range(H)]
    for position in range(OFFSET, OFFSET + 2):
        feed(cache, position, 1)
    cache.mark()
    feed(cache, OFFSET + 2, 2)
    assert cache.room == 0
    feed(cache, OFFSET + 4, 3)
    if rejected == 5:
        with pytest.raises(TrimError):
            cache.trim(6)
    cache.trim(rejected)
    cache.commit()
    kept = OFFSET + 7 - rejected
    assert cache.offset == kept
    for position in range(kept, kept + 20):
        feed(cache, position, 1)
    for position in range(OFFSET, kept + 20):
        for simulation in simulations:
            simulation.step(position)
    assert_holds(cache, simulations)
