"""The entries of a prompt in files, in a folder beside the saved prompt that they belong to.

The prompt's file names the folder, in which each layer has a file of keys and one of values. A checksum of every piece
of these is in the prompt's file, so that opening it reads none of them.
"""

import base64
import contextlib
import json
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from ..caches.memories import books
from ..caches.recording import RecordingKVCache
from ..caches.stores.file import FileStore, Layout, SavedFile
from ..entries.quantization import Quantization, pack
from ..entries.spans import spans
from ..errors import SnapKVError
from . import sealed

KEY = "book"
Progress = Callable[[int, int], None]  # called with the bytes written and their total

PIECE = 1 << 18  # bytes that share a checksum: a gather reads whole ones, but each only once
_FOLDER = re.compile(r"(.+)-[0-9a-f]{12}\.entries")
_AT_A_TIME = 32  # pieces that are written together


@contextlib.contextmanager
def written(
    target: Path, prompt_cache: list, progress: Progress | None
) -> Iterator[dict[str, str]]:
    """Writes a book's entries to a new folder beside `target`, and gives the metadata for `target`.

    After the block, the folder that `target` does not name is removed: the new one, or the old one.
    """
    new = target.with_name(f"{target.stem}-{secrets.token_hex(6)}.entries")
    folders, caches = {new, named_folder(target)}, books(prompt_cache)
    try:
        if caches:
            new.mkdir()
        yield {KEY: _write(new, caches, progress)} if caches else {}
    finally:
        for folder in filter(None, folders - {named_folder(target)}):
            shutil.rmtree(folder, ignore_errors=True)


def named_folder(target: Path) -> Path | None:
    """The folder that a book's file names, if it is that file's alone."""
    try:
        name = json.loads(sealed.metadata(target)[KEY])["folder"]
    except (SnapKVError, ValueError, LookupError, TypeError):
        return None
    own = _FOLDER.fullmatch(str(name))
    return target.with_name(name) if own and own[1] == target.stem else None


def files_of(target: Path) -> list[Path]:
    """A saved prompt's files: its own, and those of its entries if it is a book."""
    folder = named_folder(target)
    return [target, *(folder.iterdir() if folder and folder.is_dir() else [])]


def remove(target: Path) -> None:
    """Remove a saved prompt, and its entries if it is a book. Raises: OSError."""
    folder = named_folder(target)
    target.unlink(missing_ok=True)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def remove_unfinished(folder: Path, before: float) -> None:
    """Remove what killed processes left of saved prompts in a folder, if nobody has written to it since."""
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            own, is_folder = _FOLDER.fullmatch(path.name), path.is_dir()
            if own and is_folder:
                unfinished = named_folder(path.with_name(f"{own[1]}.safetensors")) != path
            else:
                unfinished = bool(sealed.TEMPORARY.fullmatch(path.name)) and not is_folder
            parts = [path, *(path.iterdir() if is_folder else [])]
            if unfinished and max(part.stat().st_mtime for part in parts) < before:
                (shutil.rmtree if is_folder else os.unlink)(path)


def open_book(path: Path, text: str, prompt_cache: list) -> None:
    """Give a book's caches the entries beside it; `text` is the metadata for KEY. Raises: SnapKVError: they aren't."""
    book = json.loads(text)
    n, how = book["entries"], book["quantization"]
    quantization = how and Quantization(*how)
    checksums = np.frombuffer(base64.b64decode(book["checksums"]), np.uint32)
    folder = Path(os.path.realpath(path)).with_name(Path(book["folder"]).name)
    for number, cache in enumerate(books(prompt_cache)):
        files = []
        for path, layout, piece in _files(folder, number, cache, quantization):
            own, checksums = np.split(checksums, [-(-n // piece)])
            files.append(SavedFile(path, layout, n, own, piece))
        cache.store = FileStore(quantization, files, n, cache.store.first_entry)
        if cache.offset != n:
            raise SnapKVError(f"its layers should hold {n} tokens")


def _write(folder: Path, caches: list[RecordingKVCache], progress: Progress | None) -> str:
    """Write the entries, a file after the other; what `open_book` is to be given."""
    quantization, n = caches[0].store.quantization, caches[0].offset
    found = [_files(folder, i, cache, quantization) for i, cache in enumerate(caches)]
    total = n * sum(layout.token for files in found for _, layout, _ in files)
    done, checksums = 0, []
    for cache, files in zip(caches, found):
        for which, (path, layout, piece) in enumerate(files):
            step, size = piece * _AT_A_TIME, piece * layout.token
            with path.open("xb") as file:
                for span in spans(0, n, step):
                    data = layout.to_bytes(cache.store.stored(which, *span))
                    file.write(data)
                    checksums += [zlib.crc32(data[i : i + size]) for i in range(0, len(data), size)]
                    done += len(data)
                    if progress is not None:
                        progress(done, total)
                file.flush()
                os.fsync(file.fileno())
    about = {
        "folder": folder.name,
        "entries": n,
        "quantization": quantization and (quantization.bits, quantization.group_size),
        "checksums": base64.b64encode(np.array(checksums, np.uint32).tobytes()).decode(),
    }
    return json.dumps(about)


def _files(
    folder: Path, number: int, cache: RecordingKVCache, quantization: Quantization | None
) -> list[tuple[Path, Layout, int]]:
    """A layer's files of keys and of values, how these lie in them, and the entries that share a checksum."""
    ones = (pack(x, quantization) for x in cache.sample)
    paths = (folder / f"{number:03d}.{kind}" for kind in ("keys", "values"))
    return [(path, x, max(1, PIECE // x.token)) for path, x in zip(paths, map(Layout.of, ones))]
