"""All entries of a layer while an answer is decoded from a few: what its tokens vote over, and gather from."""

from functools import cached_property
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from ..entries.attention import KeyBlocks, attention_votes
from ..entries.entries import Entries
from ..entries.queries import Queries
from .sources import Plain, Source


class Recollection:
    """A layer's entries: those of a cache that holds all of the prompt's, and the answer's behind them.

    Args:
        sources: where the prompt's are read from; they stay as they are.
        layer: the layer of the model.
    """

    def __init__(self, sources: list[Source], layer: Any):
        self.layer = layer
        self._answer = KVCache()
        self._sources = [*sources, Plain(self._answer)]

    def __len__(self) -> int:
        return sum(source.n_entries for source in self._sources)

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Add the answer's next tokens, `(B, n_kv_heads, L, head_dim)` each."""
        if keys.shape[2]:
            self._answer.update_and_fetch(keys, values)

    def voted_by(self, observed: Queries) -> Entries:
        """All entries, as a policy that votes scores them."""
        return _Recalled(self, observed)

    def gather(self, positions: mx.array) -> Entries:
        """The entries at uint32 `positions` `(B, n_kv_heads, n)`, plain."""
        found: Any = ()
        first = 0
        for source in filter(_holds_any, self._sources):
            last = first + source.n_entries - 1
            part = source.gather(mx.clip(positions, first, last) - first)
            here = (positions >= first)[..., None]
            found = tuple(mx.where(here, *pair) for pair in zip(part, found)) if found else part
            first = last + 1
        keys, values = found
        return Entries(keys, values, given_positions=positions, layer=self.layer)

    def keys(self, start: int, stop: int) -> mx.array:
        """The keys of `[start, stop)`, `(B, n_kv_heads, stop - start, head_dim)`."""
        parts = []
        first = 0
        for source in filter(_holds_any, self._sources):
            a, b = max(start, first) - first, min(stop, first + source.n_entries) - first
            if a < b:
                parts.append(source.read_keys(a, b))
            first += source.n_entries
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)

    def blocks(self) -> KeyBlocks:
        """All keys, to be read a block at a time."""
        one = self.keys(0, 1)
        B, H, _, D = one.shape
        waits = any(source.waits for source in self._sources)
        return KeyBlocks((B, H, len(self), D), one.dtype, self.keys, waits)


class _Recalled(Entries):
    """All entries of a recollection: votes are made of keys that are read a block at a time."""

    def __init__(self, everything: Recollection, observed: Queries):
        super().__init__(None, None, observed=observed, layer=everything.layer)
        self._everything = everything

    def __len__(self) -> int:
        return len(self._everything)

    @cached_property
    def keys(self) -> mx.array:
        return self._everything.keys(0, len(self))

    @cached_property
    def votes(self) -> mx.array:
        return attention_votes(self._everything.blocks(), self.voters)


def _holds_any(source: Source) -> bool:
    return source.n_entries > 0
