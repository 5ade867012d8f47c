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
from .failures import log
from .prefix_files import PrefixFiles
from .tails import covers

MODEL = "model"  # mlx-lm's store holds those of several; this server serves one


class Prefixes(LRUPromptCache):
    """mlx-lm's store of prompt caches, for one model.

    Caches with all entries serve any prompt that begins as theirs does; a compressed one serves only what goes on
    exactly from the tokens it has read. Where room is short, of many questions of a document one is kept, the newest.

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
        longest, known = self.files.longest(wanted)
        if known is None or longest <= n or (found := self.files.read(known)) is None:
            return cache, n
        if self._insert(known.tokens, found):
            return self._fetch(wanted)
        trim_prompt_cache(found, len(known.ids) - longest)
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

    def _insert(self, tokens: list[int], caches: list) -> bool:
        """Keep caches, unless they alone are too much; whether they are kept."""
        if not self._agreed(_bytes_of(caches) <= self._most_bytes):
            return False
        self.insert_cache(MODEL, list(tokens), caches)
        self._count()
        while self.nbytes + self.file_nbytes > self._most_bytes or (
            self.file_nbytes and _many_files_are_open()
        ):
            self.trim_to(n_sequences=len(self) - 1)
        return True

    def trim_to(self, *, n_sequences: int | None = None, n_bytes: int | None = None) -> None:
        """Give up what is over these limits: what others have all but a tail of, then the oldest."""
        before = len(self)
        if self._is_over(n_sequences, n_bytes):
            for twin in self._twins():
                self._give_up(twin)
                if not self._is_over(n_sequences, n_bytes):
                    break
        super().trim_to(n_sequences=n_sequences, n_bytes=n_bytes)
        if len(self) < before:
            self._count()

    def _is_over(self, n_sequences: int | None, n_bytes: int | None) -> bool:
        many = n_sequences is not None and len(self) > n_sequences
        return many or (n_bytes is not None and self.nbytes > n_bytes)

    def _twins(self) -> Iterator[list[int]]:
        """The oldest tokens of which other caches, that can be cut, have read all but a tail, without those before."""
        cut = [tokens for tokens in self._known() if can_trim_prompt_cache(self._caches(tokens))]
        left = [np.array(tokens, np.uint32) for tokens in cut]
        for tokens in cut:
            own = left.pop(0)
            if any(covers(other, own) for other in left):
                yield tokens
            else:
                left.append(own)

    def _give_up(self, tokens: list[int]) -> None:
        entry = self._trie.pop(MODEL, tokens)
        self._lru.remove(MODEL, tokens)
        self._n_bytes -= entry.nbytes
        self._n_bytes_by_type[entry.cache_type] -= entry.nbytes

    def drop(self, path: Path) -> None:
        """Use caches no more whose entries are in a damaged file, in memory or in files."""
        for tokens in list(self._known()):
            archives = book.archives(self._caches(tokens))
            stores = (cache.store for cache in archives)
            if any(isinstance(store, FileStore) and store.reads(path) for store in stores):
                self._give_up(tokens)
        self._count()
        if self.files is not None:
            self.files.drop(path)

    def _known(self) -> Iterator[list[int]]:
        """All tokens that caches have read, the oldest first."""
        return (key[1] for least_recent in self._lru._lrus.values() for key in least_recent)

    def _caches(self, tokens: list[int]) -> list:
        return self._trie.get(MODEL, tokens).prompt_cache

    def _count(self) -> None:
        self.file_nbytes = sum(file_bytes(self._caches(tokens)) for tokens in self._known())

    def keep(self, tokens: list[int], caches: list) -> None:
        """Write to a file what is to outlive the server."""
        if tokens and self.files is not None:
            self.files.write(tokens, caches)


def _bytes_of(caches: list) -> int:
    """What caches take, in memory and in files without names."""
    return sum(cache.nbytes for cache in caches) + file_bytes(caches)


def _many_files_are_open() -> bool:
    """Whether half of those that the process may open are; without any left, nobody could connect."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return most != resource.RLIM_INFINITY and len(os.listdir("/dev/fd")) > most / 2
