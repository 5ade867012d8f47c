"""What a request takes from what earlier ones have read, and leaves to later ones."""

from __future__ import annotations

from typing import Any

from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache

from ..batch.openai_body import Body
from .cuts import cuts
from .loaded import Loaded
from .prefixes import Prefixes
from .requests import Running


class Reuse:
    """The prefixes, as a policy and a model's caches allow to use them.

    Args:
        generation: keywords of `CompressedBatchGenerator`: policy, memory and so on.
    """

    def __init__(self, prefixes: Prefixes, loaded: Loaded, generation: dict[str, Any]):
        self._prefixes, self._tokenizer = prefixes, loaded.tokenizer
        policy = generation.get("policy")
        trims = can_trim_prompt_cache(make_prompt_cache(loaded.model))
        in_blocks = policy is not None and policy.reads_in_blocks
        recalls = generation.get("memory", "drop") != "drop"
        # Of a prompt that is read again as a whole, nothing can be known before.
        self._keeps_nothing = policy is not None and policy.stages[1].repeats is not None
        self._keeps_all = policy is None or (recalls and not in_blocks)
        # A part of what is kept can't be had: it is kept at several places.
        self._keeps_parts = not (self._keeps_nothing or in_blocks or (self._keeps_all and trims))
        # Tokens that are read whatever is known of a prompt, so that as many vote as ever.
        self._n_last = 1
        if policy is not None and self._keeps_all:
            self._n_last = max(1, policy.stages[1].obs_window)

    def fetch(self, prompt: list[int]) -> tuple[list | None, int]:
        """Caches that have read the beginning of a prompt, if there are such, and how many tokens that is."""
        if self._keeps_nothing:
            return None, 0
        return self._prefixes.fetch(prompt, self._n_last)

    def cuts(self, body: Body, prompt: list[int]) -> list[int]:
        """After how many of a prompt's tokens its caches are to be kept, in order."""
        if not self._keeps_parts:
            return []
        return cuts(body, self._tokenizer, prompt, self._keeps_all, self._n_last)

    def read(self, running: Running, n: int, tokens: list[int], caches: list) -> None:
        """Keep what caches have read after `n` of a prompt's tokens, one of its cuts."""
        self._prefixes.insert(tokens, caches)
        if self._keeps_all and n == running.cuts[-1]:  # they stand for the whole prompt
            running.recalled = list(tokens), caches  # to theirs the answer is added

    def recalled(self, running: Running, tokens: list[int], caches: list) -> tuple[list[int], list]:
        """Keep caches with all entries that a request has read, unless others of it are kept; those that are."""
        if running.recalled is None:
            running.recalled = tokens, caches
            self._prefixes.insert(tokens, caches)
        return running.recalled

    def answered(self, running: Running, tokens: list[int], caches: list) -> None:
        """Keep what a request has read and answered, also for when the server has ended."""
        if self._keeps_nothing:
            return
        self._prefixes.keep(*self.recalled(running, tokens, caches))
