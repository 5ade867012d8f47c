"""What prompts have in common: caches of what was read, by its tokens."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable

from mlx_lm.models.cache import LRUPromptCache, can_trim_prompt_cache, trim_prompt_cache

from ..caches.layers import file_bytes
from ..engine.report import format_bytes
from .failures import log
from .prefix_files import PrefixFiles
from .tails import is_tail

MODEL = "model"  # mlx-lm's store holds those of several; this server serves one


class Prefixes(LRUPromptCache):
    """mlx-lm's store of prompt caches, for one model.

    Caches with all entries serve any prompt that begins as theirs does; a compressed one serves only what goes on
    exactly from the tokens it has read. So of the former one is kept for many questions of a document, the newest's.

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
        if self.insert(known.tokens, found):
            return self._fetch(wanted)
        trim_prompt_cache(found, len(known.ids) - longest)
        return found, longest

    def _fetch(self, tokens: list[int]) -> tuple[list | None, int]:
        cache, rest = self.fetch_nearest_cache(MODEL, tokens)
        return cache, 0 if cache is None else len(tokens) - len(rest)

    def insert(self, tokens: list[int], caches: list) -> bool:
        """Keep what a prompt's caches have read, unless it alone is too much; whether it is kept."""
        if not tokens:
            return False
        n_bytes = sum(cache.nbytes for cache in caches) + file_bytes(caches)
        if not self._agreed(n_bytes <= self._most_bytes):
            log.warning(
                "%s tokens are not kept for later prompts: they take %s, and --prefix-bytes is %s",
                f"{len(tokens):,}",
                format_bytes(n_bytes),
                format_bytes(self._most_bytes),
            )
            return False
        if can_trim_prompt_cache(caches):
            self._give_up_twin(tokens)
        self.insert_cache(MODEL, list(tokens), caches)
        self._count()
        while self.nbytes + self.file_nbytes > self._most_bytes or (
            self.file_nbytes and _many_files_are_open()
        ):
            self.trim_to(n_sequences=len(self) - 1)
        return True

    def _give_up_twin(self, tokens: list[int]) -> None:
        """Give up the caches that differ from those of `tokens` by a tail only, unless they are compressed."""
        found = self._trie.search(MODEL, tokens)
        if found.longer is None or not is_tail(found.common_prefix, len(found.longer)):
            return
        if not can_trim_prompt_cache(self._trie.get(MODEL, found.longer).prompt_cache):
            return
        twin = self._trie.pop(MODEL, found.longer)
        self._lru.remove(MODEL, found.longer)
        self._n_bytes -= twin.nbytes
        self._n_bytes_by_type[twin.cache_type] -= twin.nbytes

    def trim_to(self, **limits: int | None) -> None:
        before = len(self)
        super().trim_to(**limits)
        if len(self) < before:
            self._count()

    def _count(self) -> None:
        known = (each for least_recent in self._lru._lrus.values() for each in least_recent)
        caches = (self._trie.get(*key).prompt_cache for key in known)
        self.file_nbytes = sum(map(file_bytes, caches))

    def keep(self, tokens: list[int], caches: list) -> None:
        """Write to a file what is to outlive the server."""
        if tokens and self.files is not None:
            self.files.write(tokens, caches)


def _many_files_are_open() -> bool:
    """Whether half of those that the process may open are; without any left, nobody could connect."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return most != resource.RLIM_INFINITY and len(os.listdir("/dev/fd")) > most / 2
