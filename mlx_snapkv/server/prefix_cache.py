"""What prompts have in common: caches of what was read, by its tokens."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from mlx_lm.models.cache import LRUPromptCache, can_trim_prompt_cache, trim_prompt_cache

from ..caches.file_store import FileStore
from ..caches.layers import file_bytes
from ..engine.report import format_bytes
from ..saved import book
from .api_error import log
from .prefix_files import PrefixFiles, covers

MODEL = "model"  # mlx-lm's store holds those of several; this server serves one


class PrefixCache(LRUPromptCache):
    """mlx-lm's store of prompt caches, for one model.

    Caches with all entries serve any prompt that begins as theirs does; a compressed one serves only what goes on
    exactly from the tokens it has read. Of many questions about a document only the newest is kept when the limit
    is reached.

    Args:
        most_bytes: that they may take, in memory and in files without names.
        agreed: of several ranks' answers, the one that goes for all, so that all keep the same prompts.

    Attributes:
        files: where they are kept besides, so that they outlive the server; None is nowhere.
        file_nbytes: what they take in files without names; what several share is counted for each.
    """

    files: PrefixFiles | None = None

    def __init__(self, most_bytes: int, agreed: Callable[[bool], bool] = bool):
        super().__init__(sys.maxsize)
        self._most_bytes, self._agreed = most_bytes, agreed
        self.file_nbytes = 0

    def fetch(self, tokens: list[int], n_last: int) -> tuple[list | None, int]:
        """A copy of the caches that have read most of a prompt, but for its `n_last` last tokens, and how many."""
        wanted = tokens[:-n_last]
        cache, n = self._fetch(wanted)
        if self.files is None:
            return cache, n
        longest, file = self.files.longest(wanted)
        if file is None or longest <= n or (found := self.files.read(file)) is None:
            return cache, n
        if self._insert(file.tokens, found):
            return self._fetch(wanted)
        trim_prompt_cache(found, len(file.ids) - longest)
        return found, longest

    def _fetch(self, tokens: list[int]) -> tuple[list | None, int]:
        cache, rest = self.fetch_nearest_cache(MODEL, tokens)
        return cache, 0 if cache is None else len(tokens) - len(rest)

    def insert(self, tokens: list[int], caches: list) -> None:
        """Keep what a prompt's caches have read; a line in the log if it alone is too much."""
        if tokens and not self._insert(tokens, caches):
            log.warning(
                "%s tokens are not kept for later prompts: they take %s, and --prefix-bytes is %s",
                f"{len(tokens):,}",
                format_bytes(_bytes_of(caches)),
                format_bytes(self._most_bytes),
            )

    def write(self, tokens: list[int], caches: list) -> None:
        """Write what is to outlive the server to a file."""
        if tokens and self.files is not None:
            self.files.write(tokens, caches)

    def _insert(self, tokens: list[int], caches: list) -> bool:
        """Keep caches, unless they alone are too much; whether they are kept."""
        if not self._agreed(_bytes_of(caches) <= self._most_bytes):
            return False
        self.insert_cache(MODEL, list(tokens), caches)
        self._count_files()
        while self.nbytes + self.file_nbytes > self._most_bytes or (
            self.file_nbytes and _many_files_are_open()
        ):
            self.trim_to(n_sequences=len(self) - 1)
        return True

    def trim_to(self, *, n_sequences: int | None = None, n_bytes: int | None = None) -> None:
        """Evict what is over these limits: first what other caches cover, then the oldest."""

        def is_over() -> bool:
            many = n_sequences is not None and len(self) > n_sequences
            return many or (n_bytes is not None and self.nbytes > n_bytes)

        before = len(self)
        if is_over():
            for covered in self._covered():
                self._evict(covered)
                if not is_over():
                    break
        super().trim_to(n_sequences=n_sequences, n_bytes=n_bytes)
        if len(self) < before:
            self._count_files()

    def _covered(self) -> Iterator[list[int]]:
        """The oldest tokens that other caches cover, and can be cut to."""
        trimmable = [tokens for tokens in self._known() if can_trim_prompt_cache(self._of(tokens))]
        others = [np.array(tokens, np.uint32) for tokens in trimmable]
        for tokens in trimmable:
            own = others.pop(0)
            if any(covers(other, own) for other in others):
                yield tokens
            else:
                others.append(own)

    def drop(self, path: Path) -> None:
        """Use caches no more whose entries are in a damaged file, in memory or in files."""
        for tokens in list(self._known()):
            stores = (cache.store for cache in book.archives(self._of(tokens)))
            if any(isinstance(store, FileStore) and store.reads(path) for store in stores):
                self._evict(tokens)
        self._count_files()
        if self.files is not None:
            self.files.drop(path)

    def _count_files(self) -> None:
        self.file_nbytes = sum(file_bytes(self._of(tokens)) for tokens in self._known())

    # mlx-lm's private fields, which a test of the contract watches.

    def _known(self) -> Iterator[list[int]]:
        """All tokens that caches have read, the oldest first."""
        return (key[1] for least_recent in self._lru._lrus.values() for key in least_recent)

    def _of(self, tokens: list[int]) -> list:
        return self._trie.get(MODEL, tokens).prompt_cache

    def _evict(self, tokens: list[int]) -> None:
        entry = self._trie.pop(MODEL, tokens)
        self._lru.remove(MODEL, tokens)
        self._n_bytes -= entry.nbytes
        self._n_bytes_by_type[entry.cache_type] -= entry.nbytes


def _bytes_of(caches: list) -> int:
    """What caches take, in memory and in files without names."""
    return sum(cache.nbytes for cache in caches) + file_bytes(caches)


def _many_files_are_open() -> bool:
    """Whether half of those that the process may open are; without any left, nobody could connect."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return most != resource.RLIM_INFINITY and len(os.listdir("/dev/fd")) > most / 2
