"""Decide which of a request's caches to store in the prefix cache, and which prefix a request may continue."""

from itertools import takewhile
from pathlib import Path
from typing import Any

from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache

from ..chat.prompts import common_prefix
from ..completions.body import Body, ChatBody
from ..completions.messages import Message
from ..completions.prompt import context_tokens
from ..planning.config import CompressionConfig
from ..sparse.options import N_VOTERS
from .prefix_cache import PrefixCache
from .requests import EngineRequest, Loaded

MIN_CHECKPOINT = 128  # minimum number of tokens for caches to be stored
# Number of last prompt tokens in which a template may start reasoning, as in mlx-lm's server.
MAX_THINK_START = 11


class Checkpoints:
    """Stores caches in the prefix cache and fetches them, as far as the policy and the model allow.

    A policy that evicts only after the prompt compresses a copy of the caches, so the prefix cache gets all of the
    prompt's entries. A policy that evicts during prefill leaves only compressed caches, which are stored after the
    answer.

    Args:
        prefixes: the prefix cache.
        loaded: the served model.
        options: keyword arguments of `CompressedBatchGenerator`.
    """

    def __init__(self, prefixes: PrefixCache, loaded: Loaded, options: dict[str, Any]):
        """Determine what the setting and the model's cache types allow."""
        self._prefixes = prefixes
        self._tokenizer = loaded.tokenizer
        config, _ = CompressionConfig.from_keywords(options)
        self._setting = config.setting
        compress = config.compress
        sparse = config.sparse
        # Requests for the full cache must not use entries computed with sparse attention.
        self._reads_sparsely = sparse is not None and sparse.reads_sparsely
        self._keeps_all_entries = not config.evicts_in_blocks
        counts_attention = compress is not None and compress.decode_policy.accumulates_attention
        can_trim = can_trim_prompt_cache(make_prompt_cache(loaded.model)) and not counts_attention
        # Caches that can't be trimmed can't be cut to a shorter prefix, so copies are made during prefill.
        self._needs_checkpoints = self._keeps_all_entries and not can_trim
        # Each request reads this many last tokens itself, so that its voting queries are its own.
        self._n_last = 1
        if sparse is not None:
            self._n_last = N_VOTERS
        elif compress is not None and self._keeps_all_entries:
            self._n_last = max(1, compress.decode_policy.obs_window)

    def fetch(self, prompt: list[int], full_cache: bool) -> tuple[list | None, int]:
        """Return caches for a prefix of the prompt, and the prefix's length. Return `(None, 0)` if no prefix fits.

        Args:
            prompt: token ids of the whole prompt.
            full_cache: whether the request is answered from the full cache, whatever the setting.
        """
        if full_cache and self._reads_sparsely:
            return None, 0
        # A prompt within the budget is answered with full attention, so its prefix must be exact as well.
        is_answered_exactly = self._setting is not None and self._setting.fits(len(prompt))
        return self._prefixes.fetch(prompt, self._n_last, exact=is_answered_exactly)

    def drop(self, path: Path) -> None:
        """Drop caches whose entries are in the damaged file `path`."""
        self._prefixes.drop(path)

    def positions(self, body: Body, prompt: list[int]) -> list[int]:
        """Return the prompt lengths at which copies of the caches are stored, in ascending order.

        There are up to two checkpoints. One is at the end of the system messages, minus the tokens that each request
        reads itself. The other is before the token that starts reasoning, if the template ends the prompt with it.
        """
        if not self._needs_checkpoints or not isinstance(body, ChatBody):
            return []
        if body.full_cache and self._reads_sparsely:
            return []
        system_end = self._system_end(body, prompt) - (self._n_last - 1)
        before_reasoning = min(self._reasoning_start(prompt), len(prompt) - self._n_last)
        candidates = sorted({system_end, before_reasoning})
        return [n for n in candidates if MIN_CHECKPOINT <= n < len(prompt)]

    def insert_checkpoint(
        self, request: EngineRequest, n: int, tokens: list[int], caches: list
    ) -> None:
        """Store the caches of a request whose prefill has reached checkpoint `n`."""
        self._prefixes.insert(tokens, caches)
        if n == request.checkpoints[-1]:  # the last checkpoint replaces the whole prompt
            request.kept_prefix = list(tokens), caches

    def keeps_cancelled(self, request: EngineRequest) -> bool:
        """Return whether to store the caches of a request that is cancelled during prefill."""
        return self._keeps_all_entries and not (request.body.full_cache and self._reads_sparsely)

    def insert_cancelled(self, request: EngineRequest, tokens: list[int], caches: list) -> None:
        """Store the caches of a cancelled request, unless they are very short or include voting tokens."""
        prompt = request.completion_request.prompt
        if MIN_CHECKPOINT <= len(tokens) <= len(prompt) - self._n_last:
            self._prefixes.insert(tokens, caches)

    def insert_prompt(self, request: EngineRequest, tokens: list[int], caches: list) -> None:
        """Store the caches of a prompt, unless a checkpoint was stored."""
        if request.kept_prefix is None:
            request.kept_prefix = tokens, caches
            self._prefixes.insert(tokens, caches)

    def insert_answer(self, request: EngineRequest, tokens: list[int], caches: list) -> None:
        """Store the caches of a finished request, unless its prompt's caches were stored.

        Also write the stored caches to a file, if prefixes are kept on disk.
        """
        if request.body.full_cache and (self._reads_sparsely or not self._keeps_all_entries):
            return
        self.insert_prompt(request, tokens, caches)
        files = self._prefixes.files
        if files is not None and request.kept_prefix is not None:
            kept_tokens, kept_caches = request.kept_prefix
            if kept_tokens:
                files.write(kept_tokens, kept_caches)

    def _system_end(self, body: ChatBody, prompt: list[int]) -> int:
        """Return the number of prompt tokens in the system messages.

        These are the tokens that the prompt shares with a chat of the same system messages and an empty question.
        """
        system = list(takewhile(lambda message: message.role == "system", body.messages))
        if not system:
            return 0
        other_chat = [*system, Message("user")]
        other_tokens = context_tokens(body, self._tokenizer, other_chat)
        return common_prefix([other_tokens, prompt])

    def _reasoning_start(self, prompt: list[int]) -> int:
        """Return the position at which the template starts reasoning, or the last token's position if it doesn't."""
        last = len(prompt) - 1
        if not self._tokenizer.has_thinking:
            return last
        earliest = len(prompt) - MAX_THINK_START
        start = self._tokenizer.rfind_think_start(prompt, start=earliest)
        return last if start < 0 else start
