"""Prefixes that are stored in files, so they outlive the server."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

from mlx_lm.models.cache import can_trim_prompt_cache

from .. import saved
from ..errors import SnapKVError
from ..saved import book, sealed
from ..saved.files import fingerprint, notes_and_tokens
from ..sparse.prompt_caches import caches_to_save
from .log import log
from .prefix import Prefix, as_ids, longest_prefix

NAME_DIGITS = 32  # number of hexadecimal digits in a file name
FILE_PATTERN = "[0-9a-f]" * NAME_DIGITS + ".safetensors"
# At startup, unfinished files are removed if they have not been written to for this long.
ABANDONED_SECONDS = 3600


def tokenizer_digest(tokenizer: Any) -> str:
    """Return a hash of a tokenizer's vocabulary and chat template."""
    contents = [sorted(tokenizer.get_vocab().items()), tokenizer.chat_template]
    return _digest(json.dumps(contents, default=str))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:NAME_DIGITS]


class PrefixFiles:
    """Prefixes in a folder that only its owner can read.

    The least recently used prefixes are removed when the total size exceeds the limit.

    Args:
        folder: the folder, created if missing.
        max_bytes: limit for all prefixes in the folder, including those of other settings and servers.
        model: the served model.
        setting: everything that entries depend on besides the model, such as the policy, the quantisation and the
            tokenizer. Files that were written for another model or setting are ignored.
        store_dir: folder for the temporary files of loaded prefixes; see `Sparse`.

    Attributes:
        prefixes: the usable prefixes, without their caches.

    Raises: SnapKVError: the folder can't be created or read.
    """

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        model: Any,
        setting: dict[str, str],
        store_dir: str | None = None,
    ):
        """Create the folder, find its prefixes, and remove the unfinished files of servers that were killed."""
        self._folder = folder
        self._max_bytes = max_bytes
        self._model = model
        self._store_dir = store_dir
        self._fingerprint = fingerprint(model)
        self._setting = {**setting, "model": self._fingerprint}
        self.prefixes: list[Prefix] = []
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.chmod(folder, 0o700)
            paths = list(folder.glob(FILE_PATTERN))
        except OSError as error:
            raise SnapKVError(f"--prefix-dir {folder} can't be used: {error.strerror}") from error
        for path in paths:
            prefix = self._read_prefix(path)
            if prefix is not None:
                self.prefixes.append(prefix)
        oldest_in_use = time.time() - ABANDONED_SECONDS
        book.remove_unfinished(folder, oldest_in_use)

    def _read_prefix(self, path: Path) -> Prefix | None:
        """Return a file's prefix without its caches, or None if the file is damaged or has a different setting."""
        try:
            notes, tokens = notes_and_tokens(sealed.read_metadata(path))
        except SnapKVError as error:
            log.warning("a prefix is not used: %s", error)
            return None
        if notes.get("setting") != self._setting:
            return None
        return Prefix(as_ids(tokens), is_trimmable=notes["whole"], path=path)

    def read(self, prefix: Prefix) -> list | None:
        """Return the caches in a prefix's file.

        If the file is unusable, log a warning, drop the prefix, and return None.
        """
        path = prefix.path
        try:
            prompt = saved.load(
                path,
                self._model,
                model_fingerprint=self._fingerprint,
                store_dir=self._store_dir,
            )
            has_same_tokens = prompt.tokens == prefix.ids.tolist()
            has_same_setting = prompt.notes.get("setting") == self._setting
            if not (has_same_tokens and has_same_setting):
                raise SnapKVError(f"{path} now holds another prompt")
            os.utime(path)  # mark it as used: the least recently used files are removed first
        except (SnapKVError, OSError) as error:
            log.warning("a prefix is not used: %s", error)
            self.prefixes.remove(prefix)
            return None
        return prompt.prompt_cache

    def drop(self, path: Path) -> None:
        """Drop the prefix whose folder of entries contains the damaged file `path`."""
        self.prefixes = [
            prefix
            for prefix in self.prefixes
            if book.named_folder(prefix.path.resolve()) != path.parent
        ]

    def write(self, tokens: list[int], caches: list) -> None:
        """Write caches to a file, unless another file covers their tokens. Remove files that the new file covers.

        Failures are logged as warnings.
        """
        caches = caches_to_save(caches)
        name = _digest(json.dumps([tokens, self._setting]))
        path = self._folder / f"{name}.safetensors"
        new_prefix = Prefix(as_ids(tokens), is_trimmable=can_trim_prompt_cache(caches), path=path)
        n_served, longest = longest_prefix(self.prefixes, new_prefix.ids)
        serves_all_tokens = n_served == len(tokens)
        if longest is not None and (serves_all_tokens or longest.covers(new_prefix)):
            return
        notes = {"setting": self._setting, "whole": new_prefix.is_trimmable}
        try:
            saved.save(
                path,
                self._model,
                caches,
                tokens,
                notes=notes,
                model_fingerprint=self._fingerprint,
            )
            _restrict_to_owner(path)
        except (SnapKVError, OSError) as error:
            log.warning("a prefix was not saved: %s", error)
            return
        covered_prefixes = [prefix for prefix in self.prefixes if new_prefix.covers(prefix)]
        for prefix in covered_prefixes:
            self._remove(prefix.path)
        self.prefixes.append(new_prefix)
        self._remove_oldest()

    def _remove_oldest(self) -> None:
        """Remove the least recently used prefixes until the rest fit the limit.

        The most recently used prefix is always kept.
        """
        newest_first = []  # (time of the last use, path, bytes) of each prefix
        for path in self._folder.glob(FILE_PATTERN):
            with contextlib.suppress(OSError):  # another server may have removed it
                n_bytes = sum(file.stat().st_size for file in book.files_of(path))
                newest_first.append((path.stat().st_mtime_ns, path, n_bytes))
        newest_first.sort(reverse=True)
        total_bytes = 0
        for number, (_, path, n_bytes) in enumerate(newest_first):
            total_bytes += n_bytes
            is_newest = number == 0
            if total_bytes > self._max_bytes and not is_newest:
                self._remove(path)

    def _remove(self, path: Path) -> None:
        """Remove a prefix and its files. Log a warning on failure."""
        self.prefixes = [prefix for prefix in self.prefixes if prefix.path != path]
        try:
            book.remove(path)
        except OSError as error:
            log.warning("a prefix can't be removed: %s: %s", path, error.strerror)


def _restrict_to_owner(path: Path) -> None:
    """Make a saved prompt, including its folder of entries (if any), readable only by its owner."""
    files = book.files_of(path)
    _, *entry_files = files
    if entry_files:
        entry_files[0].parent.chmod(0o700)
    for file in files:
        file.chmod(0o600)
