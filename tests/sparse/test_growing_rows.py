"""Rows that grow in memory and in a file equal one array of all rows."""

import copy

import mlx.core as mx
import numpy as np
import pytest
from entry_helpers import normal
from hypothesis import given
from hypothesis import strategies as st

from mlx_snapkv.entries.quantization import Quantization, count_bytes, pack, slice_rows
from mlx_snapkv.sparse import growing_rows
from mlx_snapkv.sparse.entry_file import SpillFile
from mlx_snapkv.sparse.growing_rows import GrowingRows

N = 100
PLAIN = normal(1, 2, N, 32)
PACKED = pack(normal(1, 2, N, 32), Quantization(4, 32))


@pytest.fixture(autouse=True, scope="module")
def few_in_memory():
    """Keep only the first 16 rows, and up to 8 of the last, in memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(growing_rows, "ENTRIES_IN_MEMORY", 16)
        patch.setattr(growing_rows, "ENTRIES_MOVED", 8)
        yield


def held(stored, n, make_spill=SpillFile, step=7):
    found = GrowingRows(slice_rows(stored, 0, 0), make_spill=make_spill)
    for start in range(0, n, step):
        found.append(slice_rows(stored, start, min(start + step, n)))
    return found


def assert_same(found, wanted):
    for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (found, wanted)), strict=True):
        assert a.dtype == b.dtype and mx.array_equal(a, b)


@pytest.mark.parametrize("stored", [PLAIN, PACKED, PLAIN.astype(mx.bfloat16)])
@pytest.mark.parametrize("make_spill", [None, SpillFile])
def test_rows_equal_the_appended_rows(stored, make_spill):
    found = held(stored, N, make_spill)
    assert len(found) == N and found.reads_allocate == (make_spill is not None)
    assert_same(found.between(0, N), stored)
    assert_same(found.between(13, 61), slice_rows(stored, 13, 61))
    for start, stop in found.spans(5, 90):
        assert_same(found.read(start, stop), slice_rows(stored, start, stop))


def test_only_the_first_rows_and_a_block_are_in_memory():
    one = count_bytes(slice_rows(PLAIN, 0, 1))
    for n in (16, 60, N):
        found = held(PLAIN, n)
        used = 16 + (n - 16) % 8
        assert used * one <= found.nbytes <= (used + 2 * 16) * one  # some room is free
        assert found.spilled_nbytes == (n - used) * one
    assert held(PLAIN, N, None).nbytes >= N * one


def test_a_row_may_hold_several_entries():
    found = GrowingRows(PLAIN[:, :, :0], 4, SpillFile)
    found.append(PLAIN)
    assert [*found.spans(0, 10)] == [(0, 4), (4, 6), (6, 8), (8, 10)]
    assert_same(found.between(0, N), PLAIN)


def test_spans_end_where_rows_are_stored_elsewhere():
    found = held(PLAIN, 45)
    assert [*found.spans(0, 45)] == [(0, 16), (16, 24), (24, 32), (32, 40), (40, 45)]
    assert [*found.spans(20, 33)] == [(20, 24), (24, 32), (32, 33)]
    assert [*found.spans(3, 9)] == [(3, 9)] and [*found.spans(9, 9)] == []


@given(st.data())
def test_rows_can_be_truncated_and_appended_again(data):
    """A copy is independent, even of rows added later, although copies share their file."""
    found, wanted = held(PLAIN, 0), np.array(PLAIN)[:, :, :0]
    kept = []
    for _ in range(data.draw(st.integers(1, 6))):
        n = data.draw(st.integers(0, wanted.shape[2]))
        start = data.draw(st.integers(0, N - 1))
        stop = data.draw(st.integers(start, N))
        kept.append((copy.deepcopy(found), wanted))
        found.truncate(n)
        found.append(PLAIN[:, :, start:stop])
        wanted = np.concatenate([wanted[:, :, :n], np.array(PLAIN)[:, :, start:stop]], axis=2)
    for rows_held, rows_wanted in [*kept, (found, wanted)]:
        n = rows_wanted.shape[2]
        assert len(rows_held) == n
        assert np.array_equal(np.array(rows_held.between(0, n)), rows_wanted)
