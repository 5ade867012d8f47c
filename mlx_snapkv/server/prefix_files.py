"""Prefixes in the files of a folder, so that they outlive the server."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from mlx_lm.models.cache import can_trim_prompt_cache

from .. import saved
from ..errors import SnapKVError
from ..saved import book, sealed
from ..saved.files import fingerprint, tokens_in
from ..sparse.prompt_caches import saved_forms
from .api_error import log

NAME_DIGITS = 32  # of a file's name
FILE_PATTERN = "[0-9a-f]" * NAME_DIGITS + ".safetensors"
ABANDONED = 3600  # seconds after the last write, an unfinished file is removed
MAX_REREAD_SHARE = 16  # one token in so many may have to be read again


@dataclass(eq=False)
class Prefix:
    """The tokens `(n,)` that caches have read, whether these can be trimmed to fewer, and the caches or their file."""

    ids: np.ndarray
    whole: bool
    caches: list = field(default_factory=list)
    path: Path = Path()

    def in_common(self, ids: np.ndarray) -> int:
        """How many of these tokens the prefix begins with."""
        n = min(len(ids), len(self.ids))
        return int(np.argmin(np.append(ids[:n] == self.ids[:n], False)))

    def covers(self, other: Prefix) -> bool:
        """Whether its caches can be trimmed to what `other` has read, but for the last sixteenth."""
        n = len(other.ids)
        return self.whole and other.whole and self.in_common(other.ids) >= n - n // MAX_REREAD_SHARE


def longest(prefixes: Iterable[Prefix], ids: np.ndarray) -> tuple[int, Prefix | None]:
    """The most of these tokens that some prefix has read, and that prefix."""
    shared = ((prefix.in_common(ids), prefix) for prefix in prefixes)
    usable = ((n, prefix) for n, prefix in shared if n and (prefix.whole or n == len(prefix.ids)))
    return max(usable, key=itemgetter(0), default=(0, None))


def as_ids(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.uint32)


def tokenizer_digest(tokenizer: Any) -> str:
    """Of a tokenizer's vocabulary and chat template."""
    about = [sorted(tokenizer.get_vocab().items()), tokenizer.chat_template]
    return hashlib.sha256(json.dumps(about, default=str).encode()).hexdigest()[:NAME_DIGITS]


class PrefixFiles:
    """Prompt caches in a folder for its owner alone; the oldest make room.

    Args:
        most_bytes: for all files in it, those of other settings and servers included.
        setting: what files that are used must agree in besides the model: tokenizer, policy, store.

    Raises: SnapKVError: the folder can't be created or read.
    """

    def __init__(self, folder: Path, most_bytes: int, model: Any, setting: dict[str, str]):
        self._folder, self._most_bytes = folder, most_bytes
        self._model, self._setting = model, {**setting, "model": fingerprint(model)}
        self.kept: list[Prefix] = []
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.chmod(folder, 0o700)
            paths = list(folder.glob(FILE_PATTERN))
        except OSError as error:
            raise SnapKVError(f"--prefix-dir {folder} can't be used: {error.strerror}") from error
        for path in paths:
            try:
                notes, tokens = tokens_in(sealed.metadata(path))
            except SnapKVError as error:
                log.warning("a prefix is not used: %s", error)
                continue
            if notes.get("setting") == self._setting:
                self.kept.append(Prefix(as_ids(tokens), notes["whole"], path=path))
        book.remove_unfinished(folder, time.time() - ABANDONED)

    def read(self, file: Prefix) -> list | None:
        """A file's caches; None, and a line in the log, if they can't be used."""
        try:
            prompt = saved.load(file.path, self._model)
            if prompt.tokens != file.ids.tolist() or prompt.notes.get("setting") != self._setting:
                raise SnapKVError(f"{file.path} now holds another prompt")
            os.utime(file.path)
        except (SnapKVError, OSError) as error:
            log.warning("a prefix is not used: %s", error)
            self.kept.remove(file)
            return None
        return prompt.prompt_cache

    def drop(self, path: Path) -> None:
        """Stop using the files of the book whose damaged file is `path`."""
        self.kept = [f for f in self.kept if book.named_folder(f.path.resolve()) != path.parent]

    def write(self, tokens: list[int], caches: list) -> None:
        """Keep caches, unless a file covers them; a line in the log if they can't be written."""
        caches = saved_forms(self._model, caches)
        name = hashlib.sha256(json.dumps([tokens, self._setting]).encode()).hexdigest()[
            :NAME_DIGITS
        ]
        path = self._folder / f"{name}.safetensors"
        file = Prefix(as_ids(tokens), can_trim_prompt_cache(caches), path=path)
        n, nearest = longest(self.kept, file.ids)
        if nearest is not None and (n == len(tokens) or nearest.covers(file)):
            return
        notes = {"setting": self._setting, "whole": file.whole}
        try:
            saved.save(path, self._model, caches, tokens, notes=notes)
            _, *parts = files = book.files_of(path)
            if parts:
                parts[0].parent.chmod(0o700)
            for file_of_prefix in files:
                file_of_prefix.chmod(0o600)
        except (SnapKVError, OSError) as error:
            log.warning("a prefix was not saved: %s", error)
            return
        for covered in filter(file.covers, list(self.kept)):
            self._remove(covered.path)
        self.kept.append(file)
        self._make_room()

    def _make_room(self) -> None:
        """Remove the oldest files, of any setting and server, but not the one just written."""
        files = []
        for path in self._folder.glob(FILE_PATTERN):
            with contextlib.suppress(OSError):  # another server has just removed it
                n_bytes = sum(part.stat().st_size for part in book.files_of(path))
                files.append((path.stat().st_mtime_ns, path, n_bytes))
        files.sort(reverse=True)
        totals = list(accumulate(n_bytes for *_, n_bytes in files))
        for total, (_, path, _) in zip(totals[1:], files[1:]):
            if total > self._most_bytes:
                self._remove(path)

    def _remove(self, path: Path) -> None:
        self.kept = [file for file in self.kept if file.path != path]
        try:
            book.remove(path)
        except OSError as error:
            log.warning("a prefix can't be removed: %s: %s", path, error.strerror)
