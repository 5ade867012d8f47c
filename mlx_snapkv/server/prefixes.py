"""What prompts have in common: caches of what was read, by its tokens."""

from __future__ import annotations

from mlx_lm.models.cache import LRUPromptCache

MODEL = "model"  # mlx-lm's store holds those of several; this server serves one


class Prefixes(LRUPromptCache):
    """mlx-lm's store of prompt caches, for one model.

    Caches with all entries serve any prompt that begins as theirs does; a compressed one serves only what goes on
    exactly from the tokens it has read.
    """

    def fetch(self, tokens: list[int]) -> tuple[list | None, int]:
        """A copy of the caches that have read most of a prompt, its last token excepted, and how many tokens."""
        cache, rest = self.fetch_nearest_cache(MODEL, tokens[:-1])
        return cache, 0 if cache is None else len(tokens) - 1 - len(rest)

    def insert(self, tokens: list[int], caches: list) -> None:
        if tokens:
            self.insert_cache(MODEL, list(tokens), caches)
