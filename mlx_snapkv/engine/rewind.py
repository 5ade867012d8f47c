"""Rolling back what was fed to a prompt cache."""

from ..caches.contract import Mark
from ..caches.layers import kv_bytes, layer_caches, members
from ..errors import TrimError


class Rewind:
    """Brings a prompt cache back to where it is now: its list, its entries and its linear states."""

    def __init__(self, prompt_cache: list):
        self._list, self._caches = prompt_cache, list(prompt_cache)
        self._marked = [(cache, cache.offset) for cache in layer_caches(prompt_cache)]
        for cache, _ in self._marked:
            cache.mark()
        self._committed: list[Mark] = []

    def restore(self) -> None:
        """Put the caches back into the list, as they were."""
        self._list[:] = self._caches
        for (cache, _), mark in zip(self._marked, self._committed):
            cache.reopen(mark)
        for cache, offset in self._marked:
            cache.rollback(cache.offset - offset)
            cache.commit()

    def release(self) -> None:
        """Go on from what was fed since; `restore` still goes back."""
        self._committed = [cache.commit() for cache, _ in self._marked]

    @property
    def kv_nbytes(self) -> int:
        """Bytes of keys and values that nothing else holds: of caches that were replaced, and of evicted entries."""
        now = {id(cache) for cache in members(self._list)}
        replaced = kv_bytes([cache for cache in members(self._caches) if id(cache) not in now])
        return replaced + sum(mark.nbytes for mark in self._committed)


def rolled_back_to(n_tokens: int, prompt_cache: list) -> bool:
    """Roll back to the first `n_tokens`; False if that is impossible, and the cache is of no more use."""
    caches = layer_caches(prompt_cache)
    if any(cache.is_compressed for cache in caches):
        return False
    try:
        for cache in caches:
            cache.rollback(cache.offset - n_tokens)
    except TrimError:
        return False
    return True


def rolled_back_beyond(n_tokens: int, prompt_cache: list) -> bool:
    """Roll back the token that some layers were fed beyond `n_tokens`, when its step was interrupted.

    False if that is impossible, and the cache is of no more use: a linear state or sliding window can't go back.
    """
    caches = layer_caches(prompt_cache)
    if all(cache.offset <= n_tokens for cache in caches):
        return True
    is_whole = True
    for cache in caches:
        try:
            cache.rollback(max(0, cache.offset - n_tokens))
        except TrimError:
            is_whole = False
    return is_whole
