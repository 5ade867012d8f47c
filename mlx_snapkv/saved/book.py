"""Books: saved prompts that keep their entries in separate files.

The entry files are in a folder next to the prompt's file. Each layer has a file of keys and a file of values. A layer
with an index also has a file of the index's codes (`sparse/index.py`). The prompt's file contains the folder's name,
and a checksum for every piece of the entry files. Keys and values are read and verified only when they are used.
"""

import base64
import contextlib
import json
import math
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from ..entries.quantization import KEYS, VALUES, Stored
from ..entries.spans import spans
from ..errors import SnapKVError
from ..paths import UNFINISHED
from ..sparse.entry_file import Layout, SavedFile
from ..sparse.index import empty_codes
from ..sparse.prompt_caches import caches_in_files
from ..sparse.stored_cache import StoredKVCache
from ..sparse.stores.file import FileStore
from . import sealed

BOOK_KEY = "book"
Progress = Callable[[int, int], None]  # called with the number of bytes written and the total

# Each piece of this size has a checksum, which is verified when the piece is first read.
CHECKSUM_BYTES = 1 << 18
# e.g. "story-0123456789ab.entries" for the book "story.safetensors"
_FOLDER_NAME = re.compile(r"(?P<stem>.+)-[0-9a-f]{12}\.entries")
PIECES_PER_WRITE = 32


@contextlib.contextmanager
def write_book(
    target: Path, prompt_cache: list, progress: Progress | None
) -> Iterator[dict[str, str]]:
    """Write a book's entries to a new folder next to `target`, and yield the metadata to store in `target`.

    The `with` block must write `target`. Afterwards, the folder that is no longer needed is removed: the folder of a
    book that `target` replaced, or the new folder if the block failed. If `prompt_cache` has no entries in files, no
    folder is written, and the metadata is empty.
    """
    old_folder = named_folder(target)
    new_folder = target.with_name(f"{target.stem}-{secrets.token_hex(6)}.entries")
    caches = caches_in_files(prompt_cache)
    try:
        if caches:
            new_folder.mkdir()
            yield {BOOK_KEY: _write_files(new_folder, caches, progress)}
        else:
            yield {}
    finally:
        used_folder = named_folder(target)  # the old folder if the block failed
        for folder in (old_folder, new_folder):
            if folder is not None and folder != used_folder:
                shutil.rmtree(folder, ignore_errors=True)


def named_folder(target: Path) -> Path | None:
    """Return the folder with a book's entries.

    Return None if `target` is not a book. Also return None if `target` was renamed or copied, because the folder may
    then belong to the original.
    """
    try:
        name = json.loads(sealed.read_metadata(target)[BOOK_KEY])["folder"]
    except (SnapKVError, ValueError, LookupError, TypeError):
        return None
    match = _FOLDER_NAME.fullmatch(str(name))
    if match is None or match["stem"] != target.stem:  # the file was renamed or copied
        return None
    return target.with_name(name)


def files_of(target: Path) -> list[Path]:
    """Return all files of a saved prompt. A book has entry files in addition to `target`."""
    files = [target]
    folder = named_folder(target)
    if folder is not None and folder.is_dir():
        files += folder.iterdir()
    return files


def remove(target: Path) -> None:
    """Remove a saved prompt, including its entries if it is a book. Raises: OSError."""
    folder = named_folder(target)
    target.unlink(missing_ok=True)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def remove_unfinished(folder: Path, before: float) -> None:
    """Remove unfinished files and folders that killed processes left in `folder`.

    Args:
        folder: the folder to clean up. Subfolders are not searched.
        before: time in seconds since the epoch. Only files and folders that were last written before this time are
            removed.
    """
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            if not _is_unfinished(path) or _last_written(path) >= before:
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def _is_unfinished(path: Path) -> bool:
    """Return whether `path` is a temporary file, or an entries folder that no book refers to."""
    if not path.is_dir():
        return UNFINISHED.fullmatch(path.name) is not None
    match = _FOLDER_NAME.fullmatch(path.name)
    if match is None:
        return False
    book_path = path.with_name(f"{match['stem']}.safetensors")
    return named_folder(book_path) != path


def _last_written(path: Path) -> float:
    """Return the time of the last write to a file or folder, in seconds since the epoch.

    For a folder, writes to its files count too.
    """
    paths = [path]
    if path.is_dir():
        paths += path.iterdir()
    return max(file_or_folder.stat().st_mtime for file_or_folder in paths)


def open_book(
    path: Path, metadata_json: str, prompt_cache: list, store_dir: str | None = None
) -> None:
    """Connect a book's caches to its entry files.

    Args:
        path: the book's file.
        metadata_json: JSON metadata stored under `BOOK_KEY`.
        prompt_cache: the caches from the book's file, which are updated in place.
        store_dir: folder for temporary files; see `Sparse`.

    Raises: SnapKVError: the folder or a file is missing, a file is damaged, or a cache has the wrong number of tokens.
    """
    metadata = json.loads(metadata_json)
    n_entries = metadata["entries"]
    remaining_checksums = np.frombuffer(base64.b64decode(metadata["checksums"]), np.uint32)
    folder = Path(os.path.realpath(path)).with_name(Path(metadata["folder"]).name)
    if not folder.is_dir():
        raise SnapKVError(
            f"the folder with its entries, {folder}, is missing: keep it beside the file"
        )
    caches = caches_in_files(prompt_cache)
    for layer_number, (cache, n_codes) in enumerate(zip(caches, metadata["codes"], strict=True)):
        saved_files = []
        for file in _files_of_layer(folder, layer_number, cache, n_entries, n_codes):
            # The checksums of all files are concatenated, in the order in which `_write_files` wrote the files.
            file_checksums, remaining_checksums = np.split(remaining_checksums, [file.n_pieces])
            saved_files.append(
                SavedFile(file.path, file.layout, file.n_rows, file_checksums, file.rows_per_piece)
            )
        keys_file, values_file, *codes_files = saved_files
        cache.store = FileStore(
            files=[keys_file, values_file],
            n_entries=n_entries,
            first_entry=cache.store.first_entry,
            folder=store_dir,
        )
        if codes_files and cache.index is not None:
            (codes_file,) = codes_files
            code_blocks = (codes_file.read(*span) for span in spans(0, n_codes))
            cache.index.fill(code_blocks, cache.store.make_spill)
        if cache.offset != n_entries:
            raise SnapKVError(f"its layers should hold {n_entries} tokens")


@dataclass(frozen=True)
class _EntryFile:
    """One layer's file of keys, values or codes, with `n_rows` rows in the given layout."""

    path: Path
    layout: Layout
    n_rows: int

    @property
    def rows_per_piece(self) -> int:
        """Return the number of rows per checksum."""
        return max(1, CHECKSUM_BYTES // self.layout.token_bytes)

    @property
    def n_pieces(self) -> int:
        return math.ceil(self.n_rows / self.rows_per_piece)

    def write(
        self, read_rows: Callable[[int, int], Stored], on_written: Callable[[int], None]
    ) -> list[int]:
        """Write all rows and return the CRC-32 of each piece.

        Args:
            read_rows: `read_rows(start, stop)` returns the rows `[start, stop)`.
            on_written: called after each write with the number of bytes written.
        """
        checksums = []
        piece_bytes = self.rows_per_piece * self.layout.token_bytes
        with self.path.open("xb") as file:
            for span in spans(0, self.n_rows, self.rows_per_piece * PIECES_PER_WRITE):
                data = self.layout.to_bytes(read_rows(*span))
                file.write(data)
                for start in range(0, len(data), piece_bytes):
                    checksums.append(zlib.crc32(data[start : start + piece_bytes]))
                on_written(len(data))
            file.flush()
            os.fsync(file.fileno())
        return checksums


def _write_files(folder: Path, caches: list[StoredKVCache], progress: Progress | None) -> str:
    """Write all layers' files to `folder`, and return the metadata for `open_book`."""
    n_entries = caches[0].offset
    n_codes = [0 if cache.index is None else len(cache.index) for cache in caches]
    files_by_layer = [
        _files_of_layer(folder, layer_number, cache, n_entries, n_codes[layer_number])
        for layer_number, cache in enumerate(caches)
    ]
    total_bytes = sum(
        file.n_rows * file.layout.token_bytes for files in files_by_layer for file in files
    )
    written_bytes = 0

    def add_written(n_bytes: int) -> None:
        nonlocal written_bytes
        written_bytes += n_bytes
        if progress is not None:
            progress(written_bytes, total_bytes)

    checksums: list[int] = []
    for cache, files in zip(caches, files_by_layer):
        for file, read_rows in zip(files, _row_readers(cache)):
            checksums += file.write(read_rows, add_written)
    metadata = {
        "folder": folder.name,
        "entries": n_entries,
        "codes": n_codes,
        "checksums": base64.b64encode(np.array(checksums, np.uint32).tobytes()).decode(),
    }
    return json.dumps(metadata)


def _row_readers(cache: StoredKVCache) -> Iterator[Callable[[int, int], Stored]]:
    """Yield a function `(start, stop) -> rows` for each of a layer's files.

    The files are those of `_files_of_layer`, in the same order.
    """
    for kind in (KEYS, VALUES):
        yield partial(cache.store.read, kind)
    if cache.index is not None:
        yield cache.index.codes.between


def _files_of_layer(
    folder: Path, layer_number: int, cache: StoredKVCache, n_entries: int, n_codes: int
) -> list[_EntryFile]:
    """Return a layer's files: one of keys, one of values and, unless `n_codes` is 0, one of the index's codes."""
    key_layout, value_layout = map(Layout.of, cache.sample_entries)
    files = [
        _EntryFile(folder / f"{layer_number:03d}.keys", key_layout, n_entries),
        _EntryFile(folder / f"{layer_number:03d}.values", value_layout, n_entries),
    ]
    if n_codes:
        code_layout = Layout.of(empty_codes(cache.sample_entries[0]))
        files.append(_EntryFile(folder / f"{layer_number:03d}.codes", code_layout, n_codes))
    return files
