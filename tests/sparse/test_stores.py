"""A store returns its entries bit for bit, or as mx.quantize rounds them to fewer bits."""

import contextlib
import copy
import os
import tempfile
import zlib
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import reference
from disk_helpers import cut_short, full_disk, unreadable
from entry_helpers import in_blocks
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_snapkv import SnapKVError
from mlx_snapkv.entries.attention import latest_votes
from mlx_snapkv.entries.entries import Entries
from mlx_snapkv.entries.quantization import KEYS, Quantization, pack, unpack
from mlx_snapkv.entries.queries import Queries
from mlx_snapkv.sparse.entry_file import Layout, SavedFile, SpillFile
from mlx_snapkv.sparse.full_view import FullView
from mlx_snapkv.sparse.stores import STORES, MemoryStore
from mlx_snapkv.sparse.stores.file import FileStore

PIECE = 7  # entries
HOW = Quantization(8, 64)
HEADS = (2, 3)


def rows_of(n, seed=0, dtype=mx.bfloat16):
    """Return random keys and values of different widths."""
    key = mx.random.key(seed)
    return [mx.random.normal((*HEADS, n, D), key=key).astype(dtype) for D in (64, 128)]


def holding(store, rows):
    store.append(rows if isinstance(rows, Entries) else Entries(*rows))
    return store


def assert_bits_equal(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert mx.array_equal(*(mx.contiguous(x).view(mx.uint8) for x in (a, b)))


def assert_holds(store, rows):
    """Assert, using every method of a store, that it contains these rows."""
    n, how = rows[0].shape[2], store.quantization
    assert store.n_entries == n
    rows = [unpack(pack(x, how), how) for x in rows]
    for a, b in ((0, n), (0, 1), (n - 1, n), (n // 3, n - n // 3)):
        if a < b:
            assert_bits_equal(store.entries(a, b), [x[:, :, a:b] for x in rows])
    positions = mx.random.randint(0, n, (*HEADS, 40)).astype(mx.uint32)
    wanted = [mx.take_along_axis(x, positions[..., None], axis=2) for x in rows]
    assert_bits_equal(store.gather(positions), wanted)
    if store.in_files:
        assert_bits_equal(store.first_entry, [x[:, :, :1] for x in rows])
    assert store.all_entries().quantization == how
    assert_bits_equal(store.all_entries().dequantized(), rows)


def saved(folder, rows):
    """Return a store of these rows in named files, and the paths of the files."""
    files, n = [], rows[0].shape[2]
    for path, x in zip((folder / "keys", folder / "values"), rows):
        layout = Layout.of(x)
        raw, size = bytes(layout.to_bytes(x)), PIECE * layout.token_bytes
        path.write_bytes(raw)
        sums = [zlib.crc32(raw[i : i + size]) for i in range(0, len(raw), size)]
        files.append(SavedFile(path, layout, n, np.array(sums, np.uint32), PIECE))
    first_entry = tuple(x[:, :, :1] for x in rows)
    store = FileStore(files=files, n_entries=n, first_entry=first_entry)
    return store, [file.path for file in files]


KINDS = [
    (kind, None if kind.bits is None else Quantization(kind.bits, 64)) for kind in STORES.values()
]


@pytest.mark.parametrize("kind, how", [*KINDS, ("saved", None)])
@settings(max_examples=30)
@given(st.data())
def test_stores_grow_shrink_and_are_copied(tmp_path_factory, kind, how, data):
    """Steps of any kind and size are taken in any order. Stores must be independent of each other."""
    rows = rows_of(20)
    in_book = kind == "saved"
    first = saved(tmp_path_factory.mktemp("book"), rows)[0] if in_book else holding(kind(how), rows)
    stores = [(first, rows)]
    for seed in range(1, data.draw(st.integers(2, 8))):
        i = data.draw(st.integers(0, len(stores) - 1))
        store, rows = stores[i]
        step = data.draw(st.sampled_from(["grow", "shrink", "copy"]))
        n = data.draw(st.integers(1, 30))
        if step == "copy":
            stores.append((copy.deepcopy(store), rows))
        elif step == "grow":
            more = rows_of(n, seed)
            holding(
                store, Entries(*more).with_quantization(data.draw(st.sampled_from([None, how])))
            )
            stores[i] = store, [mx.concatenate(both, axis=2) for both in zip(rows, more)]
        else:
            left = max(0, store.n_entries - n)
            store.truncate(left)
            stores[i] = store, [x[:, :, :left] for x in rows]
    for store, rows in stores:
        if store.n_entries == 0:
            assert store.nbytes == store.file_nbytes == 0
            assert store.first_entry is None
            rows = rows_of(5)
            holding(store, rows)
        assert_holds(store, rows)


@pytest.mark.parametrize("kind, how", [(MemoryStore, None), (MemoryStore, HOW), (FileStore, None)])
def test_votes_over_several_stores(kind, how, monkeypatch):
    in_blocks(monkeypatch, 50_000, one_pass=0)
    every, T = rows_of(321, dtype=mx.float32), 321
    parts = [[x[:, :, :300] for x in every], [x[:, :, 300:] for x in every]]
    stores = [holding(store, part) for store, part in zip((kind(how), MemoryStore()), parts)]
    keys = mx.concatenate([store.entries()[0] for store in stores], axis=2)
    queries, positions = mx.random.normal((2, 6, 3, 64)), range(T - 2, T + 1)
    view, asked = FullView(stores, layer=None), Queries(queries, positions, 0.125)
    for found, n in zip(latest_votes(view.key_reader(), asked, [2, 3]), (2, 3)):
        assert "keys" not in vars(view)  # the keys are never all in memory
        wanted = reference.votes(queries[:, :, -n:], keys, positions[-n:], 0.125)
        np.testing.assert_allclose(np.array(found), wanted, rtol=1e-5, atol=1e-7)


def test_files_have_no_name_end_with_the_store_and_are_shared_by_copies(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    store = holding(FileStore(), rows_of(2000))
    before = bytes_in_nameless_files(tmp_path)
    copies = [copy.deepcopy(store) for _ in range(3)]
    assert bytes_in_nameless_files(tmp_path) == before > 0 and not list(tmp_path.iterdir())
    for one in copies[:2]:  # the first appends to the shared files, the second to new files
        holding(one, rows_of(10))
    assert bytes_in_nameless_files(tmp_path) == before * 2020 // 2000
    copies[1].truncate(2004)  # only this copy uses its new files
    assert bytes_in_nameless_files(tmp_path) == before * 2014 // 2000
    assert [one.n_entries for one in (store, *copies)] == [2000, 2010, 2004, 2000]
    del store, copies, one
    assert bytes_in_nameless_files(tmp_path) == 0


def test_the_turns_of_a_conversation_use_the_same_files():
    """Each turn's caches are a copy of the previous ones, which are kept for undo."""
    store, turns, wanted = FileStore(), [], rows_of(10)
    for seed in range(20):
        store = copy.deepcopy(store)
        turns.append(holding(store, rows_of(10, seed)))
    assert [len(each._views) for each in turns] == [1] * 20
    assert_bits_equal(turns[0].entries(), wanted)


def test_a_copy_that_cannot_make_new_files_leaves_the_shared_files_unchanged(monkeypatch):
    """Another store has appended to the shared files, so the copy needs new ones."""
    first = holding(FileStore(), rows_of(10))
    other = copy.deepcopy(first)
    holding(first, rows_of(10, 1))
    with monkeypatch.context() as patch, pytest.raises(SnapKVError, match="nowhere"):
        patch.setattr(tempfile, "tempdir", "/nowhere")
        holding(other, rows_of(5, 2))
    assert other.n_entries == 10
    assert_bits_equal([x[:, :, 10:] for x in first.entries()], rows_of(10, 1))


def bytes_in_nameless_files(folder):
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            found += os.stat(link).st_size * os.readlink(link).startswith(str(folder))
    return found


@pytest.mark.parametrize("n_before", [0, 20])
def test_a_file_without_space_is_left_as_it_was(n_before):
    rows = rows_of(20, dtype=mx.float32)
    store = holding(FileStore(), rows) if n_before else FileStore()
    with (
        full_disk(100_000),
        pytest.raises(SnapKVError, match=r"can't be kept in a file in .*: .*; set TMPDIR"),
    ):
        holding(store, rows_of(60, seed=1, dtype=mx.float32))
    assert store.n_entries == n_before
    for part in store._views:
        for file in part.files:
            assert os.fstat(file._file.fileno()).st_size == n_before * file.layout.token_bytes
    holding(store, rows)
    assert_bits_equal([x[:, :, n_before:] for x in store.entries()], rows)


def test_a_missing_temporary_folder_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(SnapKVError, match="nowhere: No such file or directory"):
        holding(FileStore(), rows_of(2))


def flip(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("kind", [0, 1])
def test_a_piece_is_checked_when_it_is_first_read_and_only_then(tmp_path, kind):
    store, paths = saved(tmp_path, rows_of(50))
    place = 40 * Layout.of(rows_of(1)[kind]).token_bytes
    flip(paths[kind], place)
    early = mx.broadcast_to(mx.arange(10, dtype=mx.uint32), (*HEADS, 10))
    store.read(KEYS, 0, 10)
    store.gather(early)
    words = rf"{paths[kind]} is damaged: a checksum does not match from byte \d[\d,]* on; put back"
    for read in (lambda: store.gather(early + 31), store.entries):
        for _ in range(2):  # a second read must fail, too
            with pytest.raises(SnapKVError, match=words):
                read()
    flip(paths[kind], place)
    store.gather(early + 31)
    flip(paths[kind], place)
    store.gather(early + 31)  # not checked again


@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_of_another_size_is_reported_before_it_is_mapped(tmp_path, change):
    store, paths = saved(tmp_path, rows_of(50))
    size = paths[0].stat().st_size
    with paths[0].open("r+b") as file:
        file.truncate(size + change)
    words = f"keys is damaged: it should have {size:,} bytes and has {size + change:,}"
    with pytest.raises(SnapKVError, match=words):
        store.read(KEYS, 0, 1)
    with pytest.raises(SnapKVError, match=words):
        SavedFile(paths[0], Layout.of(rows_of(1)[0]), 50, np.zeros(99, np.uint32), PIECE)


def test_an_open_file_may_be_removed_but_a_removed_file_cannot_be_opened(tmp_path):
    store, paths = saved(tmp_path, rows_of(5))
    paths[1].unlink()
    assert_holds(store, rows_of(5))  # the store has the file open
    with pytest.raises(SnapKVError, match="values can't be read: No such file or directory"):
        SavedFile(paths[1], Layout.of(rows_of(1)[1]), 5, np.zeros(9, np.uint32), PIECE)


@pytest.mark.parametrize("kind", [0, 1])
def test_a_file_that_was_cut_short_is_neither_read_nor_appended_to(kind):
    """The system would fill the gap before the appended bytes with zeros."""
    store = holding(FileStore(), rows_of(20))
    file = store._views[0].files[kind]
    mend = cut_short(file._file.fileno())
    for failing in (store.entries, lambda: holding(store, rows_of(7, seed=1))):
        with pytest.raises(SnapKVError, match=r"^entries kept in a file can't be read: "):
            failing()
        assert store.n_entries == 20
    mend()
    holding(store, rows_of(7, seed=1))
    assert_bits_equal([x[:, :, :20] for x in store.entries()], rows_of(20))
    assert_bits_equal([x[:, :, 20:] for x in store.entries()], rows_of(7, seed=1))


def test_a_disk_without_room_for_offloaded_rows_is_one_sentence():
    with (
        full_disk(1000),
        pytest.raises(SnapKVError, match=r"TMPDIR or --store-dir .* another store"),
    ):
        SpillFile().append(mx.zeros((1, 2, 300, 64)))


@pytest.mark.parametrize("damage", [cut_short, unreadable])
def test_offloaded_rows_that_can_not_be_read_are_one_sentence(damage):
    pair = rows_of(20)
    spill = SpillFile()
    reads = [spill.append(tuple(pair)) for _ in range(2)]
    mend = damage(spill._file._file.fileno())
    for read in reads:
        with pytest.raises(SnapKVError, match="entries kept in a file can't be read"):
            read()
    mend()
    assert_bits_equal([*reads[0](), *reads[1]()], [*pair, *pair])
