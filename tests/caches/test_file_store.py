"""A store that begins with files of others gives what one store of all of it would, and leaves those as they are."""

import copy
import os
import zlib
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_snapkv import SnapKVError
from mlx_snapkv.caches.entry_file import SavedFile
from mlx_snapkv.caches.file_parts import FixedPart
from mlx_snapkv.caches.file_store import FileStore
from mlx_snapkv.entries.quantization import Quantization

PIECE = 1000  # which no token's bytes divide
WAYS = [None, Quantization(8, 64), Quantization(4, 64)]


def rows_of(n, seed=0):
    key = mx.random.key(seed)
    return [mx.random.normal((1, 2, n, D), key=key).astype(mx.bfloat16) for D in (64, 128)]


def saved(folder, rows, quantization=None):
    """A store of these rows in files, and the files' paths."""
    store = FileStore(quantization)
    store.append(*rows)
    files, paths = [], []
    for name, layout, data in zip(
        ("keys", "values"), store.layouts, store.data(0, rows[0].shape[2])
    ):
        raw = data.tobytes()
        sums = [zlib.crc32(raw[i : i + PIECE]) for i in range(0, len(raw), PIECE)]
        paths.append(folder / name)
        paths[-1].write_bytes(raw)
        files.append(SavedFile(paths[-1], layout, len(data), np.array(sums, np.uint32), PIECE))
    return FileStore(quantization, [FixedPart(files, rows[0].shape[2])]), paths


def flip(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def assert_same(one, other):
    assert one.n_entries == other.n_entries
    n = one.n_entries
    for found, wanted in zip(one.entries(), other.entries(), strict=True):
        assert found.dtype == wanted.dtype and mx.array_equal(found, wanted)
    for start, stop in ((0, n), (0, 1), (n - 1, n), (n // 3, n - n // 3)):
        assert mx.array_equal(one.read_keys(start, stop), other.read_keys(start, stop))
    places = mx.random.randint(0, n, (1, 2, 40)).astype(mx.uint32)
    for found, wanted in zip(one.gather(places), other.gather(places), strict=True):
        assert mx.array_equal(found, wanted)
    for found, wanted in zip(one.data(n // 2, n), other.data(n // 2, n), strict=True):
        assert np.array_equal(found, wanted)
    assert (one.nbytes, one.file_nbytes) == (other.nbytes, other.file_nbytes)
    assert one.entry_bytes == other.entry_bytes


@pytest.mark.parametrize("quantization", WAYS)
@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 60)), max_size=6),
    st.integers(1, 60),
)
def test_it_is_as_one_store_of_all(tmp_path_factory, quantization, changes, n_saved):
    store, _ = saved(tmp_path_factory.mktemp("book"), rows_of(n_saved), quantization)
    plain = FileStore(quantization)
    plain.append(*rows_of(n_saved))
    for seed, (grows, n) in enumerate(changes, start=1):
        for each in (store, plain):
            if grows:
                each.append(*rows_of(n, seed))
            else:  # also below what is saved
                each.truncate(max(1, each.n_entries - n))
    assert_same(store, plain)


@pytest.mark.parametrize("quantization", WAYS)
@given(st.data())
def test_copies_share_files_and_go_their_own_ways(quantization, data):
    """Stores grow, shrink and are copied in any order; each is as one that shares nothing with the others."""
    pairs: list = [(FileStore(quantization), rows_of(20))]
    pairs[0][0].append(*rows_of(20))
    for seed in range(1, data.draw(st.integers(2, 10))):
        i = data.draw(st.integers(0, len(pairs) - 1))
        store, rows = pairs[i]
        what, n = (
            data.draw(st.sampled_from(["grow", "shrink", "copy"])),
            data.draw(st.integers(1, 30)),
        )
        if what == "copy":
            pairs.append((copy.deepcopy(store), rows))
        elif what == "grow":
            store.append(*rows_of(n, seed))
            pairs[i] = store, [mx.concatenate(both, axis=2) for both in zip(rows, rows_of(n, seed))]
        else:
            left = max(1, store.n_entries - n)
            store.truncate(left)
            pairs[i] = store, [x[:, :, :left] for x in rows]
    for store, rows in pairs:
        alone = FileStore(quantization)
        alone.append(*rows)
        assert_same(store, alone)


def test_a_copy_writes_nothing_again(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    store = FileStore()
    store.append(*rows_of(5000))
    store.flush()
    before = blocks_of_nameless_files(tmp_path)
    copies = [copy.deepcopy(store) for _ in range(3)]
    assert blocks_of_nameless_files(tmp_path) == before > 0
    copies[0].append(*rows_of(10))
    copies[0].flush()
    assert before < blocks_of_nameless_files(tmp_path) < 1.1 * before


def blocks_of_nameless_files(folder):
    """Bytes on the disk of this process's open files that have no name in any folder."""
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        try:
            if os.readlink(link).startswith(str(folder)):
                found += os.stat(link).st_blocks * 512
        except FileNotFoundError:
            pass
    return found


def test_the_files_stay_as_they_are(tmp_path):
    store, paths = saved(tmp_path, rows_of(50))
    before = [path.read_bytes() for path in paths]
    store.truncate(20)
    store.append(*rows_of(30, seed=1))
    store.flush()
    assert [path.read_bytes() for path in paths] == before


@pytest.mark.parametrize("kind", [0, 1])
def test_a_piece_is_checked_when_it_is_first_read_and_only_then(tmp_path, kind):
    """400 bytes or more a token: token 40 lies in other pieces than the first 10 tokens."""
    store, paths = saved(tmp_path, rows_of(50))
    token = store.layouts[kind].token
    flip(paths[kind], 40 * token)
    early = mx.broadcast_to(mx.arange(10, dtype=mx.uint32), (1, 2, 10))
    store.read_keys(0, 10)
    store.gather(early)
    words = rf"{paths[kind]} is damaged: a checksum does not fit from byte \d[\d,]*000 on; put back"
    for _ in range(2):  # it does not become right by being asked again
        with pytest.raises(SnapKVError, match=words):
            store.gather(early + 30 + mx.array(1, mx.uint32))
    store.gather(early)
    if kind == 0:
        with pytest.raises(SnapKVError, match=words):
            store.read_keys(30, 50)
    flip(paths[kind], 40 * token)
    store.gather(early + 31)
    flip(paths[kind], 40 * token)
    store.gather(early + 31)  # read before


@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_of_another_size_is_told_before_it_is_mapped(tmp_path, change):
    rows = rows_of(50)
    store, paths = saved(tmp_path, rows)
    size = paths[0].stat().st_size
    with paths[0].open("r+b") as file:
        file.truncate(size + change)
    words = f"keys is damaged: it should have {size:,} bytes and has {size + change:,}"
    with pytest.raises(SnapKVError, match=words):
        store.read_keys(0, 1)
    with pytest.raises(SnapKVError, match=words):
        SavedFile(paths[0], store.layouts[0], 50, np.zeros(99, np.uint32), PIECE)


def test_a_file_that_is_not_there(tmp_path):
    store, paths = saved(tmp_path, rows_of(5))
    paths[1].unlink()
    assert_same(store, store)  # it is open, and others may have replaced it since
    with pytest.raises(SnapKVError, match="values can't be read: No such file or directory"):
        SavedFile(paths[1], store.layouts[1], 5, np.zeros(9, np.uint32), PIECE)
