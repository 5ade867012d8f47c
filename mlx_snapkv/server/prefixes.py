"""What prompts have in common: caches of what was read, by its tokens."""

from __future__ import annotations

from mlx_lm.models.cache import LRUPromptCache

from .prefix_files import PrefixFiles

MODEL = "model"  # mlx-lm's store holds those of several; this server serves one


class Prefixes(LRUPromptCache):
    """mlx-lm's store of prompt caches, for one model.

    Caches with all entries serve any prompt that begins as theirs does; a compressed one serves only what goes on
    exactly from the tokens it has read.

    Attributes:
        files: where they are kept besides, so that they outlive the server; None is nowhere.
    """

    files: PrefixFiles | None = None

    def fetch(self, tokens: list[int], n_last: int) -> tuple[list | None, int]:
        """A copy of the caches that have read most of a prompt, but for its `n_last` last tokens, and how many."""
        wanted = tokens[:-n_last]
        cache, n = self._fetch(wanted)
        if self.files is None:
            return cache, n
        longest, known = self.files.longest(wanted)
        if known is None or longest <= n or (found := self.files.read(known)) is None:
            return cache, n
        self.insert(known.tokens, found)
        return self._fetch(wanted)

    def _fetch(self, tokens: list[int]) -> tuple[list | None, int]:
        cache, rest = self.fetch_nearest_cache(MODEL, tokens)
        return cache, 0 if cache is None else len(tokens) - len(rest)

    def insert(self, tokens: list[int], caches: list) -> None:
        if tokens:
            self.insert_cache(MODEL, list(tokens), caches)

    def keep(self, tokens: list[int], caches: list) -> None:
        """Write to a file what is to outlive the server."""
        if tokens and self.files is not None:
            self.files.write(tokens, caches)
