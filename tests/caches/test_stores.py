"""What goes into a store comes out of it: bit for bit from a file, as mx.quantize makes it with fewer bits."""

import os
import tempfile

import mlx.core as mx
import pytest
from disk_helpers import full_disk

from mlx_snapkv import SnapKVError
from mlx_snapkv.caches.adapter import layer_cache
from mlx_snapkv.caches.file_store import FileStore
from mlx_snapkv.caches.stores import QuantizedStore
from mlx_snapkv.entries.quantization import Quantization

DTYPES = [mx.float32, mx.float16, mx.bfloat16]


def rows_of(n, dtype, seed=0):
    mx.random.seed(seed)
    return [mx.random.normal((2, 3, n, D)).astype(dtype) for D in (64, 128)]


def portions(rows, *stops):
    starts = (0, *stops)
    return [[x[:, :, a:b] for x in rows] for a, b in zip(starts, (*stops, rows[0].shape[2]))]


def assert_bits_equal(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        bits = mx.uint16 if a.dtype.size == 2 else mx.uint32
        assert mx.array_equal(mx.contiguous(a).view(bits), mx.contiguous(b).view(bits))


def quantised(rows, bits):
    return [mx.dequantize(*mx.quantize(x, bits=bits), bits=bits) for x in rows]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_file_gives_back_the_very_bits(dtype):
    rows = rows_of(50, dtype)
    rows[0][0, 0, 0, :3] = mx.array([mx.nan, -mx.inf, -0.0])
    store = FileStore()
    for part in portions(rows, 1, 20):
        store.append(*part)
    assert store.n_entries == 50 and store.nbytes == 0
    assert store.file_nbytes == sum(x.nbytes for x in rows) == 50 * store.entry_bytes
    assert_bits_equal(store.entries(), rows)


def test_keys_and_values_may_differ_in_dtype():
    keys, values = rows_of(9, mx.float32)
    rows = [keys, values.astype(mx.bfloat16)]
    store = FileStore()
    for part in portions(rows, 4):
        store.append(*part)
    assert_bits_equal(store.entries(), rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_rows_do_not_depend_on_the_portions(dtype, bits):
    rows = rows_of(50, dtype)
    store = QuantizedStore(Quantization(bits, 64))
    for part in portions(rows, 1, 20):
        store.append(*part)
    assert_bits_equal(store.entries(), quantised(rows, bits))
    assert store.n_entries == 50 and store.file_nbytes == 0
    plain = sum(x.nbytes for x in rows)
    assert 50 * store.entry_bytes == plain
    # A scale and a bias for each group of 64.
    assert store.nbytes == plain * (bits + 2 * 8 * dtype.size / 64) / (8 * dtype.size)


@pytest.mark.parametrize("make", [FileStore, lambda: QuantizedStore(Quantization(8, 64))])
@pytest.mark.parametrize("n", [0, 7, 20])
def test_rows_taken_back_are_as_if_they_had_never_come(make, n):
    rows, others = rows_of(20, mx.float32), rows_of(5, mx.float32, seed=1)
    store, plain = make(), make()
    store.append(*rows)
    store.truncate(n)
    assert store.n_entries == n
    store.append(*others)
    for part in portions(rows, n)[:1] if n else []:
        plain.append(*part)
    plain.append(*others)
    assert_bits_equal(store.entries(), plain.entries())
    assert (store.nbytes, store.file_nbytes) == (plain.nbytes, plain.file_nbytes)


def test_a_quantised_store_and_mlx_lms_cache_are_the_same_rows():
    store = QuantizedStore(Quantization(4, 32))
    store.append(*rows_of(9, mx.float16))
    again = QuantizedStore(Quantization(8, 64))
    assert again.take(layer_cache(store.as_cache()).held())
    assert again.n_entries == 9 and again.quantization == store.quantization
    assert_bits_equal(again.entries(), store.entries())


def open_files():
    return len(os.listdir("/dev/fd"))


def test_the_file_has_no_name_and_goes_with_the_store(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = open_files()
    store = FileStore()
    store.append(*rows_of(9, mx.float32))
    store.flush()
    assert open_files() == before + 2 and not list(tmp_path.iterdir())
    rows = store.entries()
    del store
    assert open_files() == before
    assert_bits_equal(rows, rows_of(9, mx.float32))


@pytest.fixture
def no_room():
    """Files can't grow beyond 100 kB."""
    with full_disk(100_000):
        yield


def test_a_file_without_room_is_left_as_it_was(no_room):
    store, rows = FileStore(), rows_of(20, mx.float32)
    store.append(*rows)
    with pytest.raises(SnapKVError, match=r"can't be kept in a file in .*: .*; set TMPDIR"):
        store.append(*rows_of(20, mx.float32, seed=1))
        store.flush()
    assert store.n_entries == 20
    files = store._growing.files
    sizes = [os.fstat(file._file.fileno()).st_size for file in files]
    assert sizes == [20 * file.layout.token for file in files]
    assert_bits_equal(store.entries(), rows)


def test_a_temporary_folder_that_is_not_there_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    store = FileStore()
    with pytest.raises(SnapKVError, match="nowhere: No such file or directory"):
        store.append(*rows_of(2, mx.float32))
        store.flush()
    assert store.n_entries == 0


@pytest.mark.parametrize("make", [FileStore, lambda: QuantizedStore(Quantization(8, 64))])
@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_are_read_as_the_whole_is(make, dtype):
    store = make()
    for part in portions(rows_of(50, dtype), 20):
        store.append(*part)
    n = store.n_entries
    keys, values = store.entries()
    assert_bits_equal([store.read_keys(n - 30, n - 3)], [keys[:, :, n - 30 : n - 3]])
    places = mx.sort(mx.random.randint(0, n, (2, 3, 17)), axis=-1).astype(mx.uint32)
    wanted = [mx.take_along_axis(x, places[..., None], axis=2) for x in (keys, values)]
    assert_bits_equal(store.gather(places), wanted)
    alike = mx.broadcast_to(mx.arange(5, 9, dtype=mx.uint32), (2, 3, 4))
    assert_bits_equal(store.gather(alike), [x[:, :, 5:9] for x in (keys, values)])
