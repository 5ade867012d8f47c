"""Rolls back a prompt cache.

Layer caches that only grow are trimmed. Others are restored from a copy.
"""

import contextlib
from collections.abc import Iterator

from ..caches.layers import all_caches, kv_bytes, layer_caches


class CacheCopy:
    """A snapshot of a prompt cache, for restoring it later.

    Layer caches that only grow are not copied, because they can be trimmed. Others are copied. A copy shares its arrays
    with the original until the original writes to them.
    """

    def __init__(self, prompt_cache: list):
        """Take the snapshot."""
        self._prompt_cache = prompt_cache
        self._caches_before = list(prompt_cache)
        caches = layer_caches(prompt_cache)
        self._restorers = [cache.restorer() for cache in caches]
        # For each copied cache: the cache itself, its number of tokens, and its KV bytes.
        self._copied_caches = [
            (cache, cache.offset, cache.kv_nbytes) for cache in caches if not cache.grows
        ]

    def restore(self) -> None:
        """Restore the list and every cache in it."""
        self._prompt_cache[:] = self._caches_before
        for restore in self._restorers:
            restore()

    @property
    def kv_nbytes(self) -> int:
        """Return how many KV bytes are in memory only because of this snapshot.

        They belong to caches that have been replaced or changed since the snapshot.
        """
        current_ids = {id(cache) for cache in all_caches(self._prompt_cache)}
        replaced_caches = [
            cache for cache in all_caches(self._caches_before) if id(cache) not in current_ids
        ]
        changed_bytes = sum(
            bytes_before
            for cache, offset_before, bytes_before in self._copied_caches
            if id(cache) in current_ids and cache.offset > offset_before
        )
        return kv_bytes(replaced_caches) + changed_bytes


@contextlib.contextmanager
def restoring(prompt_cache: list) -> Iterator[None]:
    """Restore the prompt cache if the `with` block raises an error."""
    caches_before = CacheCopy(prompt_cache)
    try:
        yield
    except BaseException:
        caches_before.restore()
        raise


def trim_to(n_tokens: int, prompt_cache: list) -> bool:
    """Trim a prompt cache to its first `n_tokens` tokens. Return False if it can't be trimmed."""
    caches = layer_caches(prompt_cache)
    if all(cache.offset <= n_tokens for cache in caches):
        return True
    if not all(cache.grows for cache in caches):
        return False
    for cache in caches:
        cache.trim(max(0, cache.offset - n_tokens))
    return True
