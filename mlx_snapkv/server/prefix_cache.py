"""The prefix cache: KV caches of earlier prompts, for later prompts that start with the same tokens."""

import copy
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import can_trim_prompt_cache, trim_prompt_cache

from ..caches.layers import file_bytes, first_sparse_position, layer_caches, memory_bytes
from ..planning.units import format_bytes
from ..sparse.prompt_caches import caches_in_files
from .log import log
from .prefix import Prefix, as_ids, longest_prefix
from .prefix_files import PrefixFiles


class PrefixCache:
    """KV caches of earlier prompts, in memory and in files.

    Caches that can be trimmed are used for any prompt that shares their first tokens. Other caches, such as compressed
    ones, are used only for prompts that start with all of their tokens.

    If the caches exceed the limit, prefixes that are covered by another prefix (see `Prefix.covers`) are evicted first,
    and then the oldest prefixes. For example, a prompt can be covered by a newer prompt about the same document.

    Attributes:
        max_bytes: limit for `nbytes` plus `file_nbytes`. Arrays and files shared by two caches count twice.
        files: the folder with prefixes that outlive the server, or None.
        nbytes: size in bytes of what the caches keep in memory.
        file_nbytes: size in bytes of what the caches keep in files, as with `Sparse(store="file")`.
    """

    nbytes = file_nbytes = 0

    def __init__(self, max_bytes: int, files: PrefixFiles | None = None):
        """Start with no prefixes in memory."""
        self.max_bytes = max_bytes
        self.files = files
        self._prefixes: list[Prefix] = []  # oldest first

    def fetch(self, tokens: list[int], n_unshared: int, exact: bool = False) -> tuple[list, int]:
        """Return a copy of the caches that provide the most tokens of a prompt, and the number of these tokens.

        Caches that were only in a file are also kept in memory, if they fit.

        Args:
            tokens: token ids of the prompt.
            n_unshared: number of tokens at the prompt's end that must not come from the caches.
            exact: whether to exclude entries computed with sparse attention, and quantised entries.

        Returns: `([], 0)` if no prefix can be used.
        """
        prefixes_in_files = [] if self.files is None else self.files.prefixes
        ids_to_serve = as_ids(tokens[:-n_unshared])
        n_served, prefix = longest_prefix([*self._prefixes, *prefixes_in_files], ids_to_serve)
        if prefix is None:
            return [], 0
        caches = prefix.caches
        if self.files is not None and not caches:
            caches_in_file = self.files.read(prefix)
            if caches_in_file is None:
                # The file is unusable, and `read` has dropped the prefix. Use the next best one.
                return self.fetch(tokens, n_unshared, exact)
            caches = caches_in_file
            self._insert_if_fits(prefix.ids, caches)
        inexact_from = _first_inexact_position(caches) if exact else None
        if inexact_from is not None and inexact_from < n_served:
            can_trim = inexact_from > 0 and prefix.is_trimmable
            if not can_trim:
                return [], 0
            n_served = inexact_from
        caches_of_request = copy.deepcopy(caches)
        trim_prompt_cache(caches_of_request, len(prefix.ids) - n_served)
        return caches_of_request, n_served

    def insert(self, tokens: list[int], caches: list) -> None:
        """Store the caches for `tokens`. Log a warning if they exceed the limit on their own."""
        # Unevaluated arrays would keep the inputs of the whole batch alive.
        mx.eval([cache.state for cache in caches])
        fits = self._insert_if_fits(as_ids(tokens), caches)
        if not fits:
            size = format_bytes(_size_in_bytes(caches))
            limit = format_bytes(self.max_bytes)
            why = f"they take {size}, and --prefix-bytes is {limit}"
            log.warning("%s tokens are not kept for later prompts: %s", f"{len(tokens):,}", why)

    def _insert_if_fits(self, ids: np.ndarray, caches: list) -> bool:
        """Store caches, drop the prefixes that they replace, and evict others until the limit is met.

        If the new caches exceed the limit on their own, change nothing and return False.
        """
        if _size_in_bytes(caches) > self.max_bytes:
            return False
        new_prefix = Prefix(ids, is_trimmable=can_trim_prompt_cache(caches), caches=caches)

        def is_replaced(prefix: Prefix) -> bool:
            """Return whether the new caches provide all of a prefix's tokens."""
            return new_prefix.n_usable(prefix.ids) == len(prefix.ids)

        other_prefixes = [prefix for prefix in self._prefixes if not is_replaced(prefix)]
        remaining = _evict([*other_prefixes, new_prefix], self.max_bytes, _size_in_bytes)
        self._set_prefixes(remaining)
        return True

    def trim_to(self, max_bytes: int) -> None:
        """Evict prefixes until the rest take at most `max_bytes` of memory."""
        if self.nbytes > max_bytes:
            self._set_prefixes(_evict(self._prefixes, max_bytes, memory_bytes))

    def drop(self, path: Path) -> None:
        """Drop the prefixes that read from the damaged file `path`, both in memory and in `files`."""

        def reads_path(prefix: Prefix) -> bool:
            return any(cache.store.reads(path) for cache in caches_in_files(prefix.caches))

        self._set_prefixes([prefix for prefix in self._prefixes if not reads_path(prefix)])
        if self.files is not None:
            self.files.drop(path)

    def _set_prefixes(self, prefixes: list[Prefix]) -> None:
        """Replace the list of prefixes, and update the sizes."""
        self._prefixes = prefixes
        self.nbytes = sum(memory_bytes(prefix.caches) for prefix in prefixes)
        self.file_nbytes = sum(file_bytes(prefix.caches) for prefix in prefixes)


def _first_inexact_position(caches: list) -> int | None:
    """Return the position of the first entry that is quantised or was computed with sparse attention, or None."""
    for cache in layer_caches(caches):
        store_quantization = None if cache.store is None else cache.store.quantization
        if cache.quantization is not None or store_quantization is not None:
            return 0
    return first_sparse_position(caches)


def _evict(prefixes: list[Prefix], max_bytes: int, bytes_of: Callable[[list], int]) -> list[Prefix]:
    """Evict prefixes until the rest fit in `max_bytes`, and return the rest.

    Prefixes that are covered by another one are evicted first, then the oldest.

    Args:
        prefixes: the prefixes, oldest first.
        max_bytes: maximum size of the remaining prefixes in bytes.
        bytes_of: returns the size of a prefix's caches.
    """
    remaining = list(prefixes)
    remaining_bytes = sum(bytes_of(prefix.caches) for prefix in remaining)
    while remaining and remaining_bytes > max_bytes:
        evicted = _next_to_evict(remaining)
        remaining.remove(evicted)
        remaining_bytes -= bytes_of(evicted.caches)
    return remaining


def _next_to_evict(prefixes: list[Prefix]) -> Prefix:
    """Return the oldest prefix that is covered by another one, or the oldest of all if none is covered."""

    def is_covered(prefix: Prefix) -> bool:
        return any(other.covers(prefix) for other in prefixes if other is not prefix)

    oldest = prefixes[0]
    return next(filter(is_covered, prefixes), oldest)


def _size_in_bytes(caches: list) -> int:
    """Return the size of what caches keep in memory and in files."""
    return memory_bytes(caches) + file_bytes(caches)
