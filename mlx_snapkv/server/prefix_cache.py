"""What prompts have in common: where their caches are kept, and what a prompt takes from earlier ones."""

import copy
import math
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache

from ..caches.layers import file_bytes, first_sparse, memory_bytes
from ..chat.prompts import common_prefix
from ..completions.body import Body, ChatBody
from ..completions.messages import Message
from ..completions.prompt import context_tokens
from ..planning.config import CompressionConfig
from ..planning.units import format_bytes
from ..sparse.options import N_VOTERS
from ..sparse.prompt_caches import books
from .api_error import log
from .prefix_files import Prefix, PrefixFiles, as_ids, longest
from .requests import EngineRequest, Loaded

SHORTEST = 128  # tokens that are worth a checkpoint
REASONING = 11  # tokens at the end in which a template may open the model's reasoning, as in mlx-lm's server


class PrefixCache:
    """Prompt caches, the oldest first, and `files` where they outlive the server.

    Caches with all entries serve any prompt that begins alike; a compressed one serves only an exact continuation.
    When the limit is reached, the newest of many questions about a document is kept.

    Args:
        most_bytes: for caches, in memory (`nbytes`) and in nameless files (`file_nbytes`); shared ones count for each.
    """

    files: PrefixFiles | None = None
    nbytes = file_nbytes = 0

    def __init__(self, most_bytes: int):
        self._most_bytes = most_bytes
        self._kept: list[Prefix] = []

    def __len__(self) -> int:
        return len(self._kept)

    def allow(self, n_bytes: int) -> None:
        """Change the limit, once a model tells how large its prompts are."""
        self._most_bytes = n_bytes

    def fetch(self, tokens: list[int], n_last: int, exact: bool = False) -> tuple[list | None, int]:
        """A copy of the caches that have read the most of a prompt without its last tokens, and how many those are.

        Those that are `exact` have read nothing sparsely.
        """
        ids, files = as_ids(tokens[:-n_last]), self.files
        n, prefix = longest([*self._kept, *(files.kept if files else [])], ids)
        if prefix is None:
            return None, 0
        caches = prefix.caches
        if files is not None and not caches:
            read = files.read(prefix)
            if read is None:  # it is not used again
                return self.fetch(tokens, n_last, exact)
            self._insert(prefix.ids, caches := read)
        caches = copy.deepcopy(caches)
        first = first_sparse(caches) if exact else None
        if first is not None and first < n:
            if not (prefix.whole and first):
                return None, 0
            n = first
        trim_prompt_cache(caches, len(prefix.ids) - n)
        return caches, n

    def insert(self, tokens: list[int], caches: list) -> None:
        """Keep what a prompt's caches have read; a line in the log if it alone exceeds the limit."""
        if tokens and not self._insert(as_ids(tokens), caches):
            taken, most = format_bytes(_bytes_of(caches)), format_bytes(self._most_bytes)
            why = f"they take {taken}, and --prefix-bytes is {most}"
            log.warning("%s tokens are not kept for later prompts: %s", f"{len(tokens):,}", why)

    def _insert(self, ids: np.ndarray, caches: list) -> bool:
        """Keep caches in the place of those that they can be trimmed to, unless they alone exceed the limit."""
        if _bytes_of(caches) > self._most_bytes:
            return False
        new = Prefix(ids, can_trim_prompt_cache(caches), caches)

        def serves(p: Prefix) -> bool:
            return new.in_common(p.ids) == len(p.ids) and (new.whole or len(p.ids) == len(ids))

        self._keep([*(p for p in self._kept if not serves(p)), new])
        while self.nbytes + self.file_nbytes > self._most_bytes:
            self.trim_to(n_sequences=len(self) - 1)
        return True

    def trim_to(self, *, n_sequences: float = math.inf, n_bytes: float = math.inf) -> None:
        """Evict what is over these limits: first what other caches cover, then the oldest."""
        while self._kept and (len(self) > n_sequences or self.nbytes > n_bytes):
            kept = self._kept
            covered = (p for p in kept if any(o.covers(p) for o in kept if o is not p))
            evicted = next(covered, kept[0])
            self._keep([p for p in kept if p is not evicted])

    def drop(self, path: Path) -> None:
        """Stop using caches whose entries are in this damaged file, here and in `files`."""

        def reads(prefix: Prefix) -> bool:
            return any(cache.store.reads(path) for cache in books(prefix.caches))

        self._keep([p for p in self._kept if not reads(p)])
        if self.files is not None:
            self.files.drop(path)

    def _keep(self, prefixes: list[Prefix]) -> None:
        self._kept = prefixes
        self.nbytes = sum(memory_bytes(p.caches) for p in prefixes)
        self.file_nbytes = sum(file_bytes(p.caches) for p in prefixes)


def _bytes_of(caches: list) -> int:
    """In memory and in nameless files."""
    return memory_bytes(caches) + file_bytes(caches)


class Checkpoints:
    """Fills and asks the prefix cache, as far as the policy and the model's caches allow."""

    def __init__(self, prefixes: PrefixCache, loaded: Loaded, options: dict[str, Any]):
        self._prefixes, self._tokenizer = prefixes, loaded.tokenizer
        config, _ = CompressionConfig.taken_from(options)
        self._setting, compress, sparse = config.setting, config.compress, config.sparse
        in_blocks = config.evicts_in_blocks
        # Then a request that is answered from all entries shares nothing with the others.
        self._reads_sparsely = sparse is not None and sparse.reads_sparsely
        # A policy that chooses once compresses a copy: what was read of a prompt serves any that begins alike.
        self._keeps_all = not in_blocks
        # Where a kept cache can't be trimmed to a shorter prefix, several prefixes are kept.
        counts = compress is not None and compress.decode_policy.accumulates_attention
        trims = can_trim_prompt_cache(make_prompt_cache(loaded.model)) and not counts
        self._keeps_prefixes = not (in_blocks or trims)
        # Tokens that are always read, so that the observation window is whole.
        self._n_last = 1
        if sparse is not None:
            self._n_last = N_VOTERS
        elif compress is not None and self._keeps_all:
            self._n_last = max(1, compress.decode_policy.obs_window)

    def fetch(self, prompt: list[int], full_cache: bool) -> tuple[list | None, int]:
        """Caches that have read a prefix of the prompt, if there are any, and the prefix's length."""
        if full_cache and self._reads_sparsely:
            return None, 0
        exact = self._setting is not None and self._setting.fits(
            len(prompt)
        )  # it is left to mlx-lm
        return self._prefixes.fetch(prompt, self._n_last, exact)

    def drop(self, path: Path) -> None:
        """Stop using caches whose entries are in this damaged file."""
        self._prefixes.drop(path)

    def places(self, body: Body, prompt: list[int]) -> list[int]:
        """Return after how many of a prompt's tokens its caches are kept: after the system messages, less the tokens
        that every prompt reads itself, and before the reasoning that a template opens at the end."""
        if not self._keeps_prefixes or not isinstance(body, ChatBody):
            return []
        if body.full_cache and self._reads_sparsely:
            return []
        system_end = self._system_end(body, prompt) - (self._n_last - 1)
        before_reasoning = min(self._reasoning_start(prompt), len(prompt) - self._n_last)
        return sorted(n for n in {system_end, before_reasoning} if SHORTEST <= n < len(prompt))

    def reached(self, request: EngineRequest, n: int, tokens: list[int], caches: list) -> None:
        """Keep the caches of a request that has read `n` tokens of its prompt, one of its checkpoints."""
        self._prefixes.insert(tokens, caches)
        if n == request.checkpoints[-1]:  # it stands for the whole prompt
            request.full = list(tokens), caches

    def may_break_off(self, request: EngineRequest) -> bool:
        """Whether what has been read of a prompt is kept if its client leaves."""
        return self._keeps_all and not (request.body.full_cache and self._reads_sparsely)

    def broken_off(self, request: EngineRequest, caches: list, tokens: list[int]) -> None:
        """Keep what has been read of a prompt whose client has left, if that leaves its voters to be read."""
        prompt = request.completion_request.prompt
        if SHORTEST <= len(tokens) <= len(prompt) - self._n_last:
            self._prefixes.insert(tokens, caches)

    def read(self, request: EngineRequest, caches: list, tokens: list[int]) -> None:
        """Keep the caches of a request that has read its prompt, unless a checkpoint stands for it."""
        if request.full is None:
            request.full = tokens, caches
            self._prefixes.insert(tokens, caches)

    def answered(self, request: EngineRequest, tokens: list[int], caches: list) -> None:
        """Keep the caches of an answered request, also in a file."""
        if request.body.full_cache and (self._reads_sparsely or not self._keeps_all):
            return
        self.read(request, caches, tokens)
        files, full = self._prefixes.files, request.full
        if files is not None and full is not None and full[0]:
            files.write(*full)

    def _system_end(self, body: ChatBody, prompt: list[int]) -> int:
        system = list(takewhile(lambda message: message.role == "system", body.messages))
        if not system:
            return 0
        other = [*system, Message("user")]
        return common_prefix([context_tokens(body, self._tokenizer, other), prompt])

    def _reasoning_start(self, prompt: list[int]) -> int:
        start, n = -1, len(prompt)
        if self._tokenizer.has_thinking:
            start = self._tokenizer.rfind_think_start(prompt, start=n - REASONING)
        return n - 1 if start < 0 else start
