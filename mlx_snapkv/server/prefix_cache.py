"""What prompts have in common: where their caches are kept, and what a prompt takes from earlier ones."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from mlx_lm.models.cache import (
    LRUPromptCache,
    can_trim_prompt_cache,
    make_prompt_cache,
    trim_prompt_cache,
)

from ..caches.file_store import FileStore
from ..caches.layers import file_bytes
from ..chat.prompts import common_prefix
from ..completions.body import Body, ChatBody
from ..completions.request import chat_tokens
from ..engine.report import format_bytes
from ..saved import book
from .api_error import log
from .prefix_files import PrefixFiles, covers
from .requests import EngineRequest

SHORTEST = 128  # tokens that are worth a checkpoint
# Tokens at the end in which a template may open the model's reasoning, as in mlx-lm's server.
REASONING = 11
MODEL = "model"  # mlx-lm's store holds several models' caches; this server has one model


class PrefixCache(LRUPromptCache):
    """mlx-lm's store of prompt caches, for one model.

    Caches with all entries serve any prompt that begins alike; a compressed one serves only an exact continuation.
    When the limit is reached, the newest of many questions about a document is kept.

    Args:
        most_bytes: for caches, in memory and in nameless files.
        agreed: turns this rank's answer into the one of all ranks, so that they keep the same prompts.

    Attributes:
        files: where prefixes outlive the server; None is nowhere.
        file_nbytes: in nameless files; what several caches share counts for each.
    """

    files: PrefixFiles | None = None

    def __init__(self, most_bytes: int, agreed: Callable[[bool], bool] = bool):
        super().__init__(sys.maxsize)
        self._most_bytes, self._agreed = most_bytes, agreed
        self.file_nbytes = 0

    def fetch(self, tokens: list[int], n_last: int) -> tuple[list | None, int]:
        """A copy of the caches that have read the most of a prompt without its last tokens, and how many those are."""
        wanted = tokens[:-n_last]
        cache, n = self._fetch(wanted)
        if self.files is None:
            return cache, n
        longest, file = self.files.longest(wanted)
        if file is None or longest <= n or (found := self.files.read(file)) is None:
            return cache, n
        if self._insert(file.ids.tolist(), found):
            return self._fetch(wanted)
        trim_prompt_cache(found, len(file.ids) - longest)
        return found, longest

    def _fetch(self, tokens: list[int]) -> tuple[list | None, int]:
        cache, rest = self.fetch_nearest_cache(MODEL, tokens)
        return cache, 0 if cache is None else len(tokens) - len(rest)

    def insert(self, tokens: list[int], caches: list) -> None:
        """Keep what a prompt's caches have read; a line in the log if it alone exceeds the limit."""
        if tokens and not self._insert(tokens, caches):
            log.warning(
                "%s tokens are not kept for later prompts: they take %s, and --prefix-bytes is %s",
                f"{len(tokens):,}",
                format_bytes(_bytes_of(caches)),
                format_bytes(self._most_bytes),
            )

    def _insert(self, tokens: list[int], caches: list) -> bool:
        """Keep caches, unless they alone exceed the limit; whether they are kept."""
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
        for covered in self._covered() if is_over() else ():
            self._evict(covered)
            if not is_over():
                break
        super().trim_to(n_sequences=n_sequences, n_bytes=n_bytes)
        if len(self) < before:
            self._count_files()

    def _covered(self) -> Iterator[list[int]]:
        """The oldest tokens that other caches cover, and can be trimmed to."""
        trimmable = [tokens for tokens in self._known() if can_trim_prompt_cache(self._of(tokens))]
        others = [np.array(tokens, np.uint32) for tokens in trimmable]
        for tokens in trimmable:
            own = others.pop(0)
            if any(covers(other, own) for other in others):
                yield tokens
            else:
                others.append(own)

    def drop(self, path: Path) -> None:
        """Stop using caches whose entries are in this damaged file, here and in `files`."""
        for tokens in list(self._known()):
            stores = (cache.store for cache in book.out_of_core(self._of(tokens)))
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
    """In memory and in nameless files."""
    return sum(cache.nbytes for cache in caches) + file_bytes(caches)


def _many_files_are_open() -> bool:
    """Whether half of the files that the process may open are open; without any left, nobody could connect."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return most != resource.RLIM_INFINITY and len(os.listdir("/dev/fd")) > most / 2


class Checkpoints:
    """Fills and asks the prefix cache, as far as the policy and the model's caches allow.

    Args:
        generation: keywords of `CompressedBatchGenerator`: policy, memory and so on.
    """

    def __init__(
        self, prefixes: PrefixCache, model: Any, tokenizer: Any, generation: dict[str, Any]
    ):
        self._prefixes, self._tokenizer = prefixes, tokenizer
        policy = generation.get("policy")
        in_blocks = policy is not None and policy.reads_in_blocks
        recalls = generation.get("memory", "drop") != "drop"
        # A policy that reads a prompt twice has to read all of it.
        self._keeps_nothing = policy is not None and policy.stages[1].repeats is not None
        self._keeps_all = policy is None or (recalls and not in_blocks)
        # Where a kept cache can't be trimmed to a shorter prefix, several prefixes are kept.
        trims = can_trim_prompt_cache(make_prompt_cache(model))
        self._keeps_prefixes = not (self._keeps_nothing or in_blocks or (self._keeps_all and trims))
        # Tokens that are always read, so that the observation window is whole.
        self._n_last = 1
        if policy is not None and self._keeps_all:
            self._n_last = max(1, policy.stages[1].obs_window)

    def fetch(self, prompt: list[int]) -> tuple[list | None, int]:
        """Caches that have read a prefix of the prompt, if there are any, and the prefix's length."""
        if self._keeps_nothing:
            return None, 0
        return self._prefixes.fetch(prompt, self._n_last)

    def places(self, body: Body, prompt: list[int]) -> list[int]:
        """After how many of a prompt's tokens its caches are kept, in order.

        That is after the system messages, less what every prompt reads anew. Where all entries are kept, it is also at
        the prompt's end, before the reasoning that a template opens there and omits from the next turn's prompt.
        """
        if not self._keeps_prefixes or not isinstance(body, ChatBody):
            return []
        found = {self._system_end(body, prompt) - (self._n_last - 1)}
        if self._keeps_all:
            found.add(min(self._reasoning_start(prompt), len(prompt) - self._n_last))
        return sorted(n for n in found if SHORTEST <= n < len(prompt))

    def reached(self, request: EngineRequest, n: int, tokens: list[int], caches: list) -> None:
        """Keep the caches of a request that has read `n` tokens of its prompt, one of its checkpoints."""
        self._prefixes.insert(tokens, caches)
        if self._keeps_all and n == request.checkpoints[-1]:  # it stands for the whole prompt
            request.full = list(tokens), caches

    def read(self, request: EngineRequest, tokens: list[int], caches: list) -> None:
        """Keep the caches of a request that has read its prompt, unless a checkpoint stands for it."""
        if request.full is None:
            request.full = tokens, caches
            self._prefixes.insert(tokens, caches)

    def answered(self, request: EngineRequest, tokens: list[int], caches: list) -> None:
        """Keep the caches of an answered request, also in a file."""
        if self._keeps_nothing:
            return
        self.read(request, tokens, caches)
        files, full = self._prefixes.files, request.full
        if files is not None and full is not None and full[0]:
            files.write(*full)

    def _system_end(self, body: ChatBody, prompt: list[int]) -> int:
        messages = body.template_messages()
        n = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
        if n == 0:
            return 0
        other = [*messages[:n], {"role": "user", "content": ""}]
        alone = chat_tokens(body, self._tokenizer, other, add_generation_prompt=False)
        return common_prefix([alone, prompt])

    def _reasoning_start(self, prompt: list[int]) -> int:
        last = len(prompt) - 1
        if not self._tokenizer.has_thinking:
            return last
        start = self._tokenizer.rfind_think_start(prompt, start=len(prompt) - REASONING)
        return last if start < 0 else start
