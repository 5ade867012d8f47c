"""Undoing tokens: a prompt cache that only grows is trimmed, and any other is restored from a copy."""

from ..caches.layers import kv_bytes, layer_caches, members


class CacheCopy:
    """A copy of a prompt cache: of its list, its entries and its linear states.

    For a cache that only grows, the number of tokens is noted. Any other cache is copied, and the copy shares its
    arrays until the cache writes into them.
    """

    def __init__(self, prompt_cache: list):
        """Note or copy the state of every cache."""
        self._list = prompt_cache
        self._caches = list(prompt_cache)
        caches = layer_caches(prompt_cache)
        self._restorers = [cache.restorer() for cache in caches]
        # (cache, tokens it had been fed, bytes of its entries) for each cache that was copied
        self._copied = [(c, c.offset, c.kv_nbytes) for c in caches if not c.grows]

    def restore(self) -> None:
        """Put the caches back into the list, as they were."""
        self._list[:] = self._caches
        for restore in self._restorers:
            restore()

    @property
    def kv_nbytes(self) -> int:
        """Return the bytes of keys and values that only this copy holds: of caches replaced or fed since then."""
        now = {id(cache) for cache in members(self._list)}
        replaced = kv_bytes([cache for cache in members(self._caches) if id(cache) not in now])
        return replaced + sum(
            nbytes
            for cache, offset, nbytes in self._copied
            if id(cache) in now and cache.offset > offset
        )


def trimmed_to(n_tokens: int, prompt_cache: list) -> bool:
    """Trim a prompt cache to its first `n_tokens`; return False and trim nothing if a cache does more than grow."""
    caches = layer_caches(prompt_cache)
    if all(cache.offset <= n_tokens for cache in caches):
        return True
    if not all(cache.grows for cache in caches):
        return False
    for cache in caches:
        cache.trim(max(0, cache.offset - n_tokens))
    return True
