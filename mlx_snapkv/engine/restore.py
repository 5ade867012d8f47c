"""Rolls back a prompt cache, by trimming it if it only grows, or else by restoring a copy."""

from ..caches.layers import all_caches, kv_bytes, layer_caches


class CacheCopy:
    """A snapshot of a prompt cache, for restoring it later.

    For a cache that only grows, the snapshot is just its number of tokens. Any other cache is copied, and the copy
    shares its arrays until the cache writes to them.
    """

    def __init__(self, prompt_cache: list):
        """Take the snapshot."""
        self._list = prompt_cache
        self._caches = list(prompt_cache)
        caches = layer_caches(prompt_cache)
        self._restorers = [cache.restorer() for cache in caches]
        # (cache, number of tokens, bytes of its entries) for each copied cache
        self._copied = [(c, c.offset, c.kv_nbytes) for c in caches if not c.grows]

    def restore(self) -> None:
        """Restore the list and every cache in it."""
        self._list[:] = self._caches
        for restore in self._restorers:
            restore()

    @property
    def kv_nbytes(self) -> int:
        """Return the KV bytes that only this snapshot keeps in memory, because caches were replaced or changed."""
        now = {id(cache) for cache in all_caches(self._list)}
        replaced = kv_bytes([cache for cache in all_caches(self._caches) if id(cache) not in now])
        return replaced + sum(
            nbytes
            for cache, offset, nbytes in self._copied
            if id(cache) in now and cache.offset > offset
        )


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
