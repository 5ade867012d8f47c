"""Taking back what was fed to a prompt cache."""

from __future__ import annotations

import contextlib
import copy

from mlx_lm.models.cache import KVCache, QuantizedKVCache

from ..caches.block import BlockKVCache
from ..caches.layers import members
from ..caches.offloaded import RestingKVCache
from ..caches.window import SnapKVCache
from ..errors import TrimError

_WITH_ROWS = (KVCache, QuantizedKVCache, BlockKVCache, SnapKVCache, RestingKVCache)


class Rewind:
    """Brings a prompt cache back to where it was: its list, its rows and its linear states.

    Caches of full-attention rows are trimmed. A `SnapKVCache`, which could only take back its last update, must not
    have been fed in between.
    """

    def __init__(self, prompt_cache: list):
        self._list, self._entries = prompt_cache, list(prompt_cache)
        caches = list(members(prompt_cache))
        kinds = (KVCache, QuantizedKVCache, BlockKVCache)
        self._offsets = [(c, c.offset) for c in caches if isinstance(c, kinds)]
        self._marks = [(c, c.mark()) for c in caches if isinstance(c, RestingKVCache)]
        self._states = [(c, copy.deepcopy(c)) for c in caches if not isinstance(c, _WITH_ROWS)]

    def restore(self) -> None:
        self._list[:] = self._entries
        for cache, offset in self._offsets:
            cache.trim(cache.offset - offset)
        for resting, mark in self._marks:
            resting.back_to(mark)
        for cache, before in self._states:
            vars(cache).update(vars(before))


def take_back_beyond(n_tokens: int, prompt_cache: list) -> None:
    """Take back the token that some layers have been fed beyond `n_tokens`, when its step was interrupted.

    Linear states and attention that is counted already can't be taken back: they have then seen that token.
    """
    for cache in members(prompt_cache):
        if isinstance(cache, _WITH_ROWS) and cache.offset > n_tokens:
            with contextlib.suppress(TrimError):
                cache.trim(cache.offset - n_tokens)
