"""Prefixes in the files of a folder, so that they outlive the server."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from mlx_lm.models.cache import can_trim_prompt_cache

from .. import saved
from ..caches.memories import saved_forms
from ..errors import SnapKVError
from ..saved import book, sealed
from ..saved.files import fingerprint, tokens_in
from .api_error import log

DIGITS = 32  # of a file's name
NAME = re.compile(f"[0-9a-f]{{{DIGITS}}}")
ABANDONED = 3600  # seconds after the last write, an unfinished file is removed
TAIL = 16  # one token in so many may have to be read again


def covers(other: np.ndarray, ids: np.ndarray) -> bool:
    """Whether the tokens `other` begin with all of `ids` but the last sixteenth."""
    n = len(ids) - len(ids) // TAIL
    return np.array_equal(other[:n], ids[:n])


def tokenizer_digest(tokenizer: Any) -> str:
    """Of a tokenizer's vocabulary and chat template."""
    about = [sorted(tokenizer.get_vocab().items()), tokenizer.chat_template]
    return hashlib.sha256(json.dumps(about, default=str).encode()).hexdigest()[:DIGITS]


@dataclass
class PrefixFile:
    """A file, the tokens `(n,)` that its caches have read, and whether these hold all entries and can be trimmed."""

    path: Path
    ids: np.ndarray
    whole: bool


class PrefixFiles:
    """Prompt caches in a folder of their own; only files of this setting are used, and the oldest make room.

    Args:
        folder: created, for its owner alone, if it does not exist.
        most_bytes: for all files in it, those of other settings and servers included.
        setting: what must agree besides the model: tokenizer, policy, memory.

    Raises:
        SnapKVError: the folder can't be created or read.
    """

    def __init__(self, folder: Path, most_bytes: int, model: Any, setting: dict[str, str]):
        self._folder, self._most_bytes = folder, most_bytes
        self._model, self._setting = model, {**setting, "model": fingerprint(model)}
        self._files: list[PrefixFile] = []
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.chmod(folder, 0o700)
            paths = [path for path in folder.glob("*.safetensors") if path.name[0] != "."]
            paths.sort(key=lambda path: path.stat().st_mtime)
        except OSError as error:
            raise SnapKVError(f"--prefix-dir {folder} can't be used: {error.strerror}") from error
        for path in paths:
            try:
                notes, tokens = tokens_in(sealed.metadata(path))
            except SnapKVError as error:
                log.warning("a prefix is not used: %s", error)
                continue
            if notes.get("setting") == self._setting:
                self._files.append(PrefixFile(path, _ids(tokens), notes["whole"]))
        book.remove_unfinished(folder, time.time() - ABANDONED)

    def longest(self, tokens: list[int]) -> tuple[int, PrefixFile | None]:
        """The most tokens that some file's caches have read, and that file."""
        best: tuple[int, PrefixFile | None] = 0, None
        ids = _ids(tokens)
        for file in self._files:
            both = min(len(ids), len(file.ids))
            n = int(np.argmin(np.append(ids[:both] == file.ids[:both], False)))
            if n > best[0] and (file.whole or n == len(file.ids)):
                best = n, file
        return best

    def read(self, file: PrefixFile) -> list | None:
        """A file's caches; None, and a line in the log, if they can't be used."""
        self._files.remove(file)
        try:
            found = saved.load(file.path, self._model)
            if found.tokens != file.ids.tolist() or found.notes.get("setting") != self._setting:
                raise SnapKVError(f"{file.path} has become another prompt's")
            os.utime(file.path)
        except (SnapKVError, OSError) as error:
            log.warning("a prefix is not used: %s", error)
            return None
        self._files.append(file)
        return found.prompt_cache

    def drop(self, path: Path) -> None:
        """Stop using the files of the book whose damaged file is `path`."""
        self._files = [
            file for file in self._files if book.named_folder(file.path.resolve()) != path.parent
        ]

    def write(self, tokens: list[int], caches: list) -> None:
        """Keep caches, unless a file covers them; a line in the log if they can't be written."""
        caches = saved_forms(self._model, caches)
        whole = can_trim_prompt_cache(caches)
        n, known = self.longest(tokens)
        ids = _ids(tokens)
        if known is not None and (covers(known.ids, ids) if whole else n == len(tokens)):
            return
        name = hashlib.sha256(json.dumps([tokens, self._setting]).encode()).hexdigest()[:DIGITS]
        path = self._folder / f"{name}.safetensors"
        notes = {"setting": self._setting, "whole": whole}
        try:
            saved.save(path, self._model, caches, tokens, notes=notes)
            for part in book.files_of(path):
                part.chmod(0o600)
        except (SnapKVError, OSError) as error:
            log.warning("a prefix was not kept: %s", error)
            return
        if whole:
            for covered in [f for f in self._files if f.whole and covers(ids, f.ids)]:
                self._remove(covered.path)
        self._files.append(PrefixFile(path, ids, whole))
        self._make_room()

    def _make_room(self) -> None:
        """Remove the oldest files, of any setting and server, but not the one just written."""
        found = []
        for path in self._folder.glob("*.safetensors"):
            with contextlib.suppress(OSError):  # another server has just removed it
                if NAME.fullmatch(path.stem):
                    n_bytes = sum(part.stat().st_size for part in book.files_of(path))
                    found.append((path.stat().st_mtime_ns, path, n_bytes))
        taken = sum(n_bytes for *_, n_bytes in found)
        for _, path, n_bytes in sorted(found)[:-1]:
            if taken <= self._most_bytes:
                return
            taken -= n_bytes
            self._remove(path)

    def _remove(self, path: Path) -> None:
        """Remove a file; a line in the log if that fails."""
        self._files = [file for file in self._files if file.path != path]
        try:
            book.remove(path)
        except OSError as error:
            log.warning("a prefix is not removed: %s can't be: %s", path, error.strerror)


def _ids(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.uint32)
