"""Positions squeezed towards the end, against a NumPy reference that tries every gap."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_snapkv.caches.compaction import looked_up, squeezed


def reference(positions: np.ndarray, end: int, span: int) -> np.ndarray:
    """One head: the largest step that fits, found by trying."""
    steps = np.diff([*positions.tolist(), end])
    if steps.sum() > span:
        fits = [m for m in range(1, int(steps.max()) + 1) if np.minimum(steps, m).sum() <= span]
        steps = np.minimum(steps, max(fits, default=1))
    return end - np.cumsum(steps[::-1])[::-1]


heads = st.lists(st.sets(st.integers(0, 400), min_size=5, max_size=5), min_size=1, max_size=3)
runs = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 6)), min_size=1, max_size=8)


@given(heads, st.integers(1, 80), st.integers(0, 500))
def test_equals_the_reference(found, more, span):
    positions = np.array([[sorted(head) for head in found]])
    end = int(positions.max()) + more
    new = np.array(squeezed(mx.array(positions.astype(np.uint32)), end, span))
    assert new.dtype == np.uint32
    for row, was in zip(new[0], positions[0]):
        assert row.tolist() == reference(was, end, span).tolist()


@given(runs, st.integers(1, 60), st.integers(0, 500))
def test_runs_stay_runs_and_nothing_moves_backward(found, more, span):
    """Runs `(gap before, length)`."""
    positions: list[int] = []
    for gap, length in found:
        start = (positions[-1] if positions else -1) + gap + 1
        positions += range(start, start + length)
    old, end = np.array(positions), positions[-1] + more
    new = np.array(squeezed(mx.array(old, mx.uint32)[None, None], end, span))[0, 0].astype(int)
    assert (np.diff(new) >= 1).all() and new[-1] < end
    assert (new >= old).all()
    assert (np.diff(new)[np.diff(old) == 1] == 1).all()
    assert (np.diff(new) <= np.diff(old)).all()
    assert end - new[0] <= max(span, len(new))
    if end - old[0] <= span:
        assert (new == old).all()


def test_worked_out_by_hand():
    """Gaps of 90 and 190 shrink alike: 40 positions have room for 18 each beside four steps of one."""
    old = mx.array([[[0, 1, 2, 92, 93, 283]]], mx.uint32)
    assert squeezed(old, 284, 40).tolist() == [[[244, 245, 246, 264, 265, 283]]]
    assert squeezed(old, 284, 0).tolist() == [[list(range(278, 284))]]


@pytest.mark.parametrize("span", [100_000, 2**30])
def test_positions_of_a_billion_tokens(span):
    old = np.sort(np.random.default_rng(0).choice(2**30, (1, 2, 300), replace=False))
    end = 2**30 + 7
    new = np.array(squeezed(mx.array(old.astype(np.uint32)), end, span)).astype(int)
    steps = np.diff(np.pad(new, [(0, 0), (0, 0), (0, 1)], constant_values=end))
    assert (steps.sum(axis=-1) <= span).all() and (new >= old).all()
    assert span > 2**29 or (steps.sum(axis=-1) > span - 300).all()


@given(st.sets(st.integers(0, 60), min_size=1), st.lists(st.integers(0, 60), min_size=1))
def test_positions_are_looked_up(known, positions):
    moved = {n: n + 7 for n in known}
    table = mx.array(sorted(known), mx.uint32)[None, None]
    found = looked_up(mx.array(positions, mx.uint32)[None, None], table, table + 7)
    assert found.tolist() == [[[moved.get(n, n) for n in positions]]]
