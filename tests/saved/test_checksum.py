"""A file's checksum is counted while it is written."""

import zlib

import pytest

from mlx_snapkv.saved import sealed

HEAD = b'{"__metadata__":{"0.checksum":"00000000","0.notes":"x"}}'
CONTENT = len(HEAD).to_bytes(8, "little") + HEAD + bytes(range(256)) * 20_000
PLACE = 8 + HEAD.index(b"00000000")


def written(path, content, sizes):
    """A sealed file, written in pieces of these sizes and the rest at once."""
    with sealed.sealed(path) as writer:
        start = 0
        for size in sizes:
            assert writer.write(memoryview(content)[start : start + size]) == size
            start += size
        writer.write(content[start:])
    return path


def test_it_is_that_of_all_bytes_however_they_are_written(tmp_path):
    for sizes in ((), (8, len(HEAD)), [1] * 90, (70, 900)):
        path = written(tmp_path / "whole", CONTENT, sizes)
        digits = b"%08x" % zlib.crc32(CONTENT)
        assert path.read_bytes() == CONTENT[:PLACE] + digits + CONTENT[PLACE + 8 :]
        assert sealed.is_whole(path)


@pytest.mark.parametrize("content", [b"123", (2).to_bytes(8, "little") + b"{}", b"\xff" * 99])
def test_a_file_without_a_place_for_it_is_not_whole(tmp_path, content):
    with pytest.raises(ValueError):
        written(tmp_path / "none", content, ())
    (tmp_path / "other").write_bytes(content)
    assert not sealed.is_whole(tmp_path / "other") and not sealed.is_whole(tmp_path / "none")
