"""What a request takes from what earlier ones have read, and leaves to later ones."""

from __future__ import annotations

from typing import Any

from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache

from ..batch.openai_body import Body
from .cuts import cuts
from .loaded import Loaded
from .prefixes import Prefixes


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
        self._keeps_all = policy is None or (recalls and not in_blocks)
        # A part of what is kept can't be had: it is kept at several places.
        self._keeps_parts = not in_blocks and not (self._keeps_all and trims)
        # Tokens that are read whatever is known of a prompt, so that as many vote as ever.
        self._n_last = 1
        if policy is not None and self._keeps_all and trims:
            self._n_last = max(1, policy.stages[1].obs_window)

    def fetch(self, prompt: list[int]) -> tuple[list | None, int]:
        """Caches that have read the beginning of a prompt, if there are such, and how many tokens that is."""
        return self._prefixes.fetch(prompt, self._n_last)

    def cuts(self, body: Body, prompt: list[int]) -> list[int]:
        """After how many of a prompt's tokens its caches are to be kept, in order."""
        return cuts(body, self._tokenizer, prompt, self._keeps_all) if self._keeps_parts else []

    def ends_at(self, n: int, wanted: list[int]) -> bool:
        """Whether the caches kept after `n` tokens, one of the cuts `wanted`, stand for the whole prompt."""
        return self._keeps_all and n == wanted[-1]
