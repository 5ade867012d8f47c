"""The entries of a book, in a folder beside the saved prompt that they belong to.

The prompt's file holds the resident entries and names the folder, in which each layer has a file of keys and one of
values, in a `Layout`. A checksum of every piece of these is in the prompt's file, which is itself sealed, so that
opening a book reads none of them.
"""

import base64
import contextlib
import json
import os
import re
import secrets
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ..caches.file_store import FileStore, Layout, SavedFile
from ..caches.layers import members
from ..caches.out_of_core import OutOfCoreKVCache
from ..entries.quantization import Quantization, Stored, pack
from ..errors import SnapKVError
from . import sealed

KEY = "book"
Progress = Callable[[int, int], None]  # called with the bytes written and their total

PIECE = 1 << 18  # bytes that share a checksum: a gather reads whole ones, but each only once
_KINDS = ("keys", "values")
_FOLDER = re.compile(r"(.+)-[0-9a-f]{12}\.entries")
_AT_A_TIME = 1 << 23  # bytes


def out_of_core(prompt_cache: list) -> list[OutOfCoreKVCache]:
    """The caches whose entries are stored elsewhere."""
    return [cache for cache in members(prompt_cache) if isinstance(cache, OutOfCoreKVCache)]


@contextlib.contextmanager
def written(
    target: Path, prompt_cache: list, progress: Progress | None
) -> Iterator[dict[str, str]]:
    """Writes a book's entries to a new folder beside `target`, and gives the metadata for `target`.

    After the block, the folder that `target` does not name is removed: the new one, or the old one.
    """
    folders = [named_folder(target)]
    caches = out_of_core(prompt_cache)
    try:
        if caches:
            folder = target.with_name(f"{target.stem}-{secrets.token_hex(6)}.entries")
            folders.append(folder)
            folder.mkdir()
            yield {KEY: _write(folder, caches, progress or (lambda done, total: None))}
        else:
            yield {}
    finally:
        ours = [folder for folder in folders if folder is not None]
        now = named_folder(target) if ours else None
        for folder in ours:
            if folder != now:
                _remove(folder)


def named_folder(target: Path) -> Path | None:
    """The folder that a book's file names, if it is that file's alone."""
    if not target.exists():
        return None
    try:
        name = json.loads(sealed.metadata(target)[KEY])["folder"]
    except (SnapKVError, ValueError, LookupError, TypeError):
        return None
    own = re.fullmatch(re.escape(target.stem) + r"-[0-9a-f]{12}\.entries", str(name))
    return target.with_name(name) if own else None


def files_of(target: Path) -> list[Path]:
    """A saved prompt's files: its own, and those of its entries if it is a book."""
    folder = named_folder(target)
    return [target, *(_entry_files(folder) if folder else [])]


def remove(target: Path) -> None:
    """Remove a saved prompt, and its entries if it is a book. Raises: OSError."""
    folder = named_folder(target)
    target.unlink(missing_ok=True)
    if folder is not None:
        _remove(folder)


def remove_unfinished(folder: Path, before: float) -> None:
    """Remove what killed processes left of saved prompts in a folder, if nobody has written to it since."""
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            if not _is_unfinished(path) or _last_written(path) >= before:
                continue
            if path.is_dir():
                _remove(path)
            else:
                path.unlink()


def _is_unfinished(path: Path) -> bool:
    if sealed.TEMPORARY.fullmatch(path.name):
        return path.is_file()
    own = _FOLDER.fullmatch(path.name)
    if own is None or not path.is_dir():
        return False
    return named_folder(path.with_name(f"{own[1]}.safetensors")) != path


def _last_written(path: Path) -> float:
    files = _entry_files(path) if path.is_dir() else []
    return max(each.stat().st_mtime for each in [path, *files])


def open_book(path: Path, text: str, prompt_cache: list) -> None:
    """Give the caches of a book's file the entries beside it; `text` is the metadata for KEY.

    Raises:
        SnapKVError: a file is missing, or has another size than it should.
    """
    book = json.loads(text)
    bits, n, piece = book["bits"], book["entries"], book["piece"]
    quantization = None if bits is None else Quantization(bits, book["group_size"])
    checksums = np.frombuffer(base64.b64decode(book["checksums"]), np.uint32)
    folder = Path(os.path.realpath(path)).with_name(Path(book["folder"]).name)
    for number, cache in enumerate(out_of_core(prompt_cache)):
        files = []
        for kind, layout in zip(_KINDS, _layouts(cache, quantization)):
            n_pieces = -(-n * layout.token // piece)
            own, checksums = checksums[:n_pieces], checksums[n_pieces:]
            files.append(SavedFile(folder / _name(number, kind), layout, n, own, piece))
        cache.store = FileStore(quantization, files, n)
    if any(cache.offset != n for cache in out_of_core(prompt_cache)):
        raise SnapKVError(f"its layers should hold {n} tokens")


def _write(folder: Path, caches: Sequence[OutOfCoreKVCache], progress: Progress) -> str:
    quantization, n = caches[0].store.quantization, caches[0].offset
    layouts = [_layouts(cache, quantization) for cache in caches]
    total = n * sum(layout.token for own in layouts for layout in own)
    done = 0
    checksums: list[int] = []
    for number, (cache, own) in enumerate(zip(caches, layouts)):
        of_token = sum(layout.token for layout in own)
        step = max(1, _AT_A_TIME // of_token)
        with contextlib.ExitStack() as opened:
            files = [
                _PiecewiseWriter(opened.enter_context((folder / _name(number, kind)).open("xb")))
                for kind in _KINDS
            ]
            for start in range(0, n, step):
                entries = cache.store.stored(start, min(start + step, n))
                found = entries.stored_keys, entries.stored_values
                for file, layout, stored in zip(files, own, found):
                    file.write(layout.to_bytes(stored))
                done += of_token * len(entries)
                progress(done, total)
            for file in files:
                checksums += file.finish()
    about = {
        "folder": folder.name,
        "entries": n,
        "bits": getattr(quantization, "bits", None),
        "group_size": getattr(quantization, "group_size", None),
        "piece": PIECE,
        "checksums": base64.b64encode(np.array(checksums, np.uint32).tobytes()).decode(),
    }
    return json.dumps(about)


def _layouts(cache: OutOfCoreKVCache, quantization: Quantization | None) -> list[Layout]:
    """Of a layer's keys and values."""
    stored: list[Stored] = [pack(x[:, :, :1], quantization) for x in (cache.keys, cache.values)]
    return [Layout.of(x) for x in stored]


class _PiecewiseWriter:
    """Computes the checksum of every piece of a file as it is written."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self._checksums: list[int] = []
        self._rest = bytearray()  # of the piece under way

    def write(self, data: memoryview) -> None:
        self._file.write(data)
        self._rest += data
        n = len(self._rest) // PIECE * PIECE
        self._checksums += [zlib.crc32(self._rest[i : i + PIECE]) for i in range(0, n, PIECE)]
        del self._rest[:n]

    def finish(self) -> list[int]:
        """The checksums, once the whole file has reached the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._checksums + ([zlib.crc32(self._rest)] if self._rest else [])


def _name(number: int, kind: str) -> str:
    return f"{number:03d}.{kind}"


def _remove(folder: Path) -> None:
    """Remove a folder of entries, or as much of it as possible."""
    with contextlib.suppress(OSError):
        for file in _entry_files(folder):
            file.unlink(missing_ok=True)
        folder.rmdir()


def _entry_files(folder: Path) -> list[Path]:
    return [file for kind in _KINDS for file in folder.glob(f"*.{kind}")]
