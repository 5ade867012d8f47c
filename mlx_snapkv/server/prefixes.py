"""What prompts have in common: caches of what was read, by its tokens."""

from __future__ import annotations

from mlx_lm.models.cache import LRUPromptCache

MODEL = "model"  # mlx-lm's store holds those of several; this server serves one


class Prefixes(LRUPromptCache):
    """mlx-lm's store of prompt caches, for one model.

    Caches with all entries serve any prompt that begins as theirs does; a compressed one serves only what goes on
    exactly from the tokens it has read.
    """

    def fetch(self, tokens: list[int], n_last: int) -> tuple[list | None, int]:
        """A copy of the caches that have read most of a prompt, but for its `n_last` last tokens, and how many."""
        wanted = tokens[:-n_last]
        cache, rest = self.fetch_nearest_cache(MODEL, wanted)
        return cache, 0 if cache is None else len(wanted) - len(rest)

    def insert(self, tokens: list[int], caches: list) -> None:
        if tokens:
            self.insert_cache(MODEL, list(tokens), caches)
