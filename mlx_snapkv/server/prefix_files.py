"""What prompts have read, in files of a folder, so that it outlives the server."""

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
from ..saved import book, header
from ..saved.files import tokens_in
from ..saved.fingerprint import fingerprint
from .failures import log
from .tails import covers

DIGITS = 32  # of a file's name
NAME = re.compile(f"[0-9a-f]{{{DIGITS}}}")
UNFINISHED = (
    3600  # seconds: what nobody has written to for so long was left by a server that was killed
)


@dataclass
class Known:
    """A file, and the tokens that its caches have read.

    Attributes:
        ids: the tokens, uint32 `(n,)`.
        whole: all entries are there, so that caches of a part of the tokens can be had.
    """

    path: Path
    ids: np.ndarray
    whole: bool

    @property
    def tokens(self) -> list[int]:
        return self.ids.tolist()

    def n_common(self, ids: np.ndarray) -> int:
        """How many tokens both begin with."""
        n = min(len(ids), len(self.ids))
        differ = np.flatnonzero(ids[:n] != self.ids[:n])
        return int(differ[0]) if differ.size else n


class PrefixFiles:
    """Prompt caches in a folder of their own, the oldest given up for room; only files of this setting are used.

    Args:
        folder: made, for its owner alone, if it is not there.
        most_bytes: that all files in it may take, those of other settings and servers too.
        model: whose caches they are.
        setting: what must be the same when they are used, besides the model: tokenizer, policy, memory.

    Raises:
        SnapKVError: the folder can't be made or read.
    """

    def __init__(self, folder: Path, most_bytes: int, model: Any, setting: dict[str, str]):
        self._folder, self._most_bytes = folder, most_bytes
        self._model, self._setting = model, {**setting, "model": fingerprint(model)}
        self._known: list[Known] = []
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.chmod(folder, 0o700)
            named = (path for path in folder.glob("*.safetensors") if path.name[0] != ".")
            found = sorted(named, key=lambda path: path.stat().st_mtime)
        except OSError as error:
            raise SnapKVError(f"--prefix-dir {folder} can't be used: {error.strerror}") from error
        for path in found:
            self._take(path)
        book.remove_unfinished(folder, time.time() - UNFINISHED)

    def _take(self, path: Path) -> None:
        """Take note of a file, unless it is damaged or of another setting."""
        try:
            notes, tokens = tokens_in(header.read(path))
        except SnapKVError as error:
            log.warning("a prefix is not used: %s", error)
            return
        if notes.get("setting") == self._setting:
            self._known.append(Known(path, _ids(tokens), notes["whole"]))

    def longest(self, tokens: list[int]) -> tuple[int, Known | None]:
        """How many of the tokens some file's caches have read, the most of all."""
        best: tuple[int, Known | None] = 0, None
        ids = _ids(tokens)
        for known in self._known:
            n = known.n_common(ids)
            if n > best[0] and (known.whole or n == len(known.ids)):
                best = n, known
        return best

    def read(self, known: Known) -> list | None:
        """A file's caches; None, and a line in the log, if they are of no use."""
        try:
            found = saved.load(known.path, self._model)
            if found.tokens != known.tokens or found.notes.get("setting") != self._setting:
                raise SnapKVError(f"{known.path} has become another prompt's")
            os.utime(known.path)
        except (SnapKVError, OSError) as error:
            log.warning("a prefix is not used: %s", error)
            self._known.remove(known)
            return None
        self._known.append(self._known.pop(self._known.index(known)))
        return found.prompt_cache

    def drop(self, path: Path) -> None:
        """Use a damaged file of a book's entries no more."""
        folder = path.parent
        self._known = [
            known for known in self._known if book.named_folder(known.path.resolve()) != folder
        ]

    def write(self, tokens: list[int], caches: list) -> None:
        """Keep caches, unless others have all but a tail of theirs; a line in the log if there is no room."""
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
            for file in book.files_of(path):
                file.chmod(0o600)
        except (SnapKVError, OSError) as error:
            log.warning("a prefix was not kept: %s", error)
            return
        if whole:
            for twin in [k for k in self._known if k.whole and covers(ids, k.ids)]:
                self._forget(twin)
        self._known.append(Known(path, ids, whole))
        self._make_room()

    def _make_room(self) -> None:
        """Give up the oldest, of whatever setting and server, but for the one that was just written."""
        there = self._by_age()
        taken = sum(n_bytes for _, n_bytes in there)
        while taken > self._most_bytes and len(there) > 1:
            path, n_bytes = there.pop(0)
            taken -= n_bytes
            self._known = [known for known in self._known if known.path != path]
            _remove(path)

    def _by_age(self) -> list[tuple[Path, int]]:
        """The files that servers have written here, the oldest first, with what each takes."""
        found = []
        for path in self._folder.glob("*.safetensors"):
            with contextlib.suppress(OSError):  # another server's, which has just given it up
                if NAME.fullmatch(path.stem):
                    found.append((path.stat().st_mtime_ns, path, _n_bytes(path)))
        return [(path, n_bytes) for _, path, n_bytes in sorted(found)]

    def _forget(self, known: Known) -> None:
        self._known.remove(known)
        _remove(known.path)


def _remove(path: Path) -> None:
    """Remove a prefix; a line in the log if it can't be."""
    try:
        book.remove(path)
    except OSError as error:
        log.warning("a prefix is not removed: %s can't be: %s", path, error.strerror)


def _ids(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.uint32)


def _n_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in book.files_of(path))


def tokenizer_digest(tokenizer: Any) -> str:
    """Tells one tokenizer from another, and its chat template."""
    about = [sorted(tokenizer.get_vocab().items()), tokenizer.chat_template]
    return hashlib.sha256(json.dumps(about, default=str).encode()).hexdigest()[:DIGITS]
