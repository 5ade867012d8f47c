"""A file's checksum is counted while it is written, and a write that fails leaves nothing behind."""

import io
import zlib

import pytest
from disk_helpers import full_disk
from saved_helpers import saved_file
from tiny_models import make_llama

from mlx_snapkv import SnapKVError
from mlx_snapkv.saved import sealed

HEAD = b'{"__metadata__":{"0.checksum":"00000000","0.notes":"x"}}'
CONTENT = len(HEAD).to_bytes(8, "little") + HEAD + bytes(range(256)) * 20_000
PLACE = 8 + HEAD.index(b"00000000")


class WriteOnly(io.BytesIO):
    def read(self, *size):
        raise AssertionError("what was written is read again")


def written(content, sizes):
    """A sealed file's bytes, written in pieces of these sizes and the rest at once."""
    file = WriteOnly()
    writer = sealed.SealedWriter(file)
    start = 0
    for size in sizes:
        assert writer.write(memoryview(content)[start : start + size]) == size
        start += size
    writer.write(content[start:])
    writer.seal()
    return file.getvalue()


def test_it_is_that_of_all_bytes_but_its_digits_however_they_are_written(tmp_path):
    right = zlib.crc32(CONTENT[:PLACE] + CONTENT[PLACE + 8 :])
    for sizes in ((), (8, len(HEAD)), [1] * 90, (70, 900)):
        data = written(CONTENT, sizes)
        assert data == CONTENT[:PLACE] + b"%08x" % right + CONTENT[PLACE + 8 :]
    path = tmp_path / "whole"
    path.write_bytes(data)
    assert sealed.is_whole(path)


@pytest.mark.parametrize("content", [b"123", (2).to_bytes(8, "little") + b"{}", b"\xff" * 99])
def test_a_file_without_a_place_for_it_is_not_whole(tmp_path, content):
    with pytest.raises(ValueError):
        written(content, ())
    with pytest.raises(io.UnsupportedOperation):
        sealed.SealedWriter(io.BytesIO()).seek(0)
    (tmp_path / "other").write_bytes(content)
    assert not sealed.is_whole(tmp_path / "other")
    assert not sealed.is_whole(tmp_path / "none")


def test_a_write_that_fails_midway_is_told_with_its_reason(path, tokens):
    model = make_llama()
    before = saved_file(path, model, tokens).read_bytes()
    with full_disk(len(before) // 2), pytest.raises(SnapKVError) as error:
        saved_file(path, model, tokens)
    assert str(error.value) == f"{path} can't be written: File too large"
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert path.read_bytes() == before
