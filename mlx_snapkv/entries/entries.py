"""The KV entries of one layer, with all that a policy may ask about them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import mlx.core as mx

from ..errors import Missing, SnapKVError
from .attention import KeyReader, above_average, attention_weights, block_size, latest_votes
from .quantization import KEYS, VALUES, Quantization, Stored, each, n_rows, pack, rows, unpack
from .queries import Queries
from .spans import spans

ByBlock = Callable[[int, int, list[mx.array]], mx.array]

_NO_LAYER: Any = Missing(
    "the policy needs the layer as well as its entries: prefill with mlx_snapkv.prefill",
    latent=False,
)
_NO_STATISTICS: Any = Missing(
    "the statistics of a layer's queries are missing: give the policy a query_statistics, "
    "and prefill with mlx_snapkv.prefill"
)


@dataclass
class Entries:
    """The KV entries of one layer, for a policy to score. Attributes are computed lazily, and once.

    A policy may use the fields below and `keys`, `values`, `positions`, `queries`, `raw_queries`, `attention`, `votes`
    and `above_average`. The last five raise SnapKVError if no queries were observed.

    Entries are in order of position. A layer with `latent` entries (MLA) stores latents and the positional part of
    keys: `keys` are then both, side by side, and `values` are the latents.

    Attributes:
        stored_keys, stored_values: `(B, n_kv_heads, T, head_dim)`, or the parts of quantised entries.
        observed: the queries that vote; None if no queries were recorded.
        given_positions: uint32 `(B, n_kv_heads, T)`, positions in the prompt; None if the entries are the prompt's
            first `T`.
        received: `(B, n_kv_heads, T)` float32, attention received so far; None if it was not counted.
        quantization: how the entries are stored.
        layer: the `AttentionLayer`: `.attention`, the mlx-lm attention module; `.rope`, its RoPE module or None;
            `.number`, its index among the model's full-attention layers; and functions of these. Its attributes raise
            SnapKVError if no layer was given.
        statistics: `Statistics` of the queries, whose attributes raise SnapKVError if the policy did not ask for them.
        budget: number of entries to keep per KV head; None if unknown.
        n_window: number of newest entries that are kept in any case; None if unknown.
        shared_votes: votes of the same queries computed before, by number of entries, places of the queries and counts.
        waits: whether reading entries allocates memory, so that each block must be computed before the next is read.
    """

    stored_keys: Stored
    stored_values: Stored
    observed: Queries | None = None
    given_positions: mx.array | None = None
    received: mx.array | None = None
    quantization: Quantization | None = None
    layer: Any = None
    statistics: Any = None
    budget: int | None = None
    n_window: int | None = None
    shared_votes: dict[tuple[int, ...], mx.array] | None = None

    waits = False

    def __post_init__(self):
        """Replace a missing layer and missing statistics by placeholders whose attributes raise SnapKVError."""
        self.layer = self.layer or _NO_LAYER
        self.statistics = self.statistics or _NO_STATISTICS

    def __len__(self) -> int:
        """Return `T`, the number of entries per KV head."""
        return n_rows(self.stored_keys)

    def plain(self) -> tuple[mx.array, mx.array]:
        """Return the stored keys and values without quantisation, `(B, n_kv_heads, T, ...)` each."""
        keys, values = self.stored_keys, self.stored_values
        return unpack(keys, self.quantization), unpack(values, self.quantization)

    @cached_property
    def keys(self) -> mx.array:
        """Return the vectors that queries are multiplied by, `(B, n_kv_heads, T, head_dim)`."""
        return self.read_keys(0, len(self))

    @cached_property
    def values(self) -> mx.array:
        """Return the vectors that the attention sums up, `(B, n_kv_heads, T, head_dim)`."""
        return self.read_values(0, len(self))

    def read_keys(self, start: int, stop: int, after: Sequence[mx.array] = ()) -> mx.array:
        """Return the keys of `[start, stop)`, `(B, n_kv_heads, stop - start, head_dim)`, computed after `after`."""
        keys = self._read(KEYS, start, stop, after)
        if not self.layer.latent:
            return keys
        positional = self._read(VALUES, start, stop)  # an MLA cache stores it in place of values
        return mx.concatenate([keys, positional], axis=-1)

    def read_values(self, start: int, stop: int, after: Sequence[mx.array] = ()) -> mx.array:
        """Return the values of `[start, stop)`, `(B, n_kv_heads, stop - start, head_dim)`, computed after `after`."""
        return self._read(KEYS if self.layer.latent else VALUES, start, stop, after)

    def _read(self, which: int, start: int, stop: int, after: Sequence[mx.array] = ()) -> mx.array:
        """Return the stored keys or values of `[start, stop)`, unquantised; `which` is `KEYS` or `VALUES`."""
        stored = rows((self.stored_keys, self.stored_values)[which], start, stop)
        if after:
            stored = each(lambda x: mx.depends(x, list(after)), stored)
        return unpack(stored, self.quantization)

    def by_block(self, function: ByBlock, blocks: Iterable[tuple[int, int]]) -> mx.array:
        """Return the results of `function(start, stop, after)` for all blocks, joined along axis 2.

        `after` makes MLX compute each block after the block before it, so that only one takes memory.
        """
        parts: list[mx.array] = []
        for start, stop in blocks:
            parts.append(function(start, stop, parts[-1:]))
            if self.waits:
                mx.eval(parts[-1])
        return mx.concatenate(parts, axis=2)

    def keys_of_heads(self, heads: slice, after: Sequence[mx.array] = ()) -> mx.array:
        """Return the keys of some KV heads, `(B, n, T, head_dim)`, computed after `after`."""
        of_heads = self._map(lambda x: mx.depends(x[:, heads], list(after)))
        return of_heads.read_keys(0, len(self))

    def blocks(self) -> KeyReader:
        """Return all keys in a form that is read some KV heads at a time."""
        first_key = self.read_keys(0, 1)
        B, H, _, D = first_key.shape
        return KeyReader(shape=(B, H, len(self), D), dtype=first_key.dtype, read=self.keys_of_heads)

    def of_keys(self, function: Callable[[mx.array], mx.array], width: int = 0) -> mx.array:
        """Return the results of `function` for all blocks of float32 keys, joined along axis 2.

        Args:
            function: takes keys `(B, n_kv_heads, n, head_dim)`.
            width: numbers that `function` computes for each key, which limits the size of a block.
        """

        def of_block(start: int, stop: int, after: list[mx.array]) -> mx.array:
            return function(self.read_keys(start, stop, after).astype(mx.float32))

        B, H, _, D = self.blocks().shape
        size = block_size(4 * B * H * max(D, width))
        return self.by_block(of_block, spans(0, len(self), size))

    @cached_property
    def positions(self) -> mx.array:
        """Return the entries' positions in the prompt, uint32 `(B, n_kv_heads, T)`."""
        if self.given_positions is not None:
            return self.given_positions
        shape = (*self.read_keys(0, 1).shape[:2], len(self))
        return mx.broadcast_to(mx.arange(len(self), dtype=mx.uint32), shape)

    @property
    def voters(self) -> Queries:
        """Return the observed queries. Raises: SnapKVError: no queries were recorded."""
        if self.observed is None:
            raise SnapKVError(
                "a layer's queries are missing: pass queries=, or prefill with mlx_snapkv.prefill"
            )
        return self.observed

    @property
    def queries(self) -> mx.array:
        """Return the observed queries, post-RoPE, `(B, n_heads, n, head_dim)`."""
        return self.voters.heads

    @cached_property
    def raw_queries(self) -> mx.array:
        """Return the observed queries as they were before the layer's RoPE, `(B, n_heads, n, head_dim)` float32."""
        start = self.voters.start
        if start is None:
            # Places are positions only if no entry has been evicted.
            if self.given_positions is not None:
                raise SnapKVError("a layer's queries have no positions: give Queries a start")
            start = self.voters.places.start
        return self.layer.undo_rope(self.queries, start)

    @cached_property
    def attention(self) -> mx.array:
        """Return the attention weights of each observed query, `(B, n_heads, n, T)` float32.

        They are causal; with attention sinks they sum to less than 1.
        """
        return attention_weights(self.blocks(), self.voters)

    @cached_property
    def votes(self) -> mx.array:
        """Return `attention` summed over the queries and averaged over a GQA group, `(B, n_kv_heads, T)` float32."""
        return self._votes_of_last(len(self.voters.places))[0]

    def latest_votes(self, *counts: int) -> list[mx.array]:
        """Return the votes of the last queries, for each number of queries in `counts`.

        The votes of all queries are computed with them, and kept as `votes`.
        """
        votes, *latest = self._votes_of_last(len(self.voters.places), *counts)
        vars(self).setdefault("votes", votes)  # where the cached property looks first
        return latest

    def _votes_of_last(self, *counts: int) -> mx.array:
        """Return the votes of the last queries, `(len(counts), B, n_kv_heads, T)` float32."""
        shared = {} if self.shared_votes is None else self.shared_votes
        places = self.voters.places
        key = (len(self), places.start, places.stop, *counts)
        if key not in shared:
            shared[key] = latest_votes(self.blocks(), self.voters, counts)
        return shared[key]

    @cached_property
    def above_average(self) -> mx.array:
        """Return how many queries give an entry at least the average weight, `(B, n_kv_heads, T)` float32."""
        return above_average(self.blocks(), self.voters)

    def taken(self, chosen: mx.array) -> Entries:
        """Return the entries at uint32 indices `chosen` `(B, n_kv_heads, n)`, without queries."""
        indices = {3: chosen, 4: chosen[..., None]}  # number of an array's axes -> indices
        taken = self._map(lambda x: mx.take_along_axis(x, indices[x.ndim], axis=2))
        return replace(taken, observed=None, shared_votes=None)

    def between(self, start: int, stop: int) -> Entries:
        """Return the entries `[start, stop)`; the places of the queries do not change."""
        if (start, stop) == (0, len(self)):
            return self
        part = self._map(lambda x: x[:, :, start:stop])
        # The key of shared votes has the number of entries, but not the first of them.
        return part if start == 0 else replace(part, shared_votes=None)

    def _map(self, function: Callable[[mx.array], mx.array]) -> Entries:
        """Return entries with `function` applied to each of their arrays `(B, n_kv_heads, T, ...)`."""
        received = None if self.received is None else function(self.received)
        return replace(
            self,
            stored_keys=each(function, self.stored_keys),
            stored_values=each(function, self.stored_values),
            received=received,
            given_positions=function(self.positions),
        )

    def packed(self, quantization: Quantization | None) -> Entries:
        """Return the entries stored in the form of `quantization`."""
        if quantization == self.quantization:
            return self
        keys, values = (pack(x, quantization) for x in self.plain())
        return replace(self, stored_keys=keys, stored_values=values, quantization=quantization)

    def release(self) -> None:
        """Drop keys and values, and all that was computed from them, so that MLX can free their memory."""
        self.stored_keys = self.stored_values = None
        for name in ("keys", "values", "raw_queries", "attention", "votes", "above_average"):
            vars(self).pop(name, None)
