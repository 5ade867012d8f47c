"""The KV entries of one layer, with everything that a policy may use to score them."""

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
    """The KV entries of one layer, for a policy to score. Attributes are computed once, when they are first used.

    A policy may use the fields below and `keys`, `values`, `positions`, `queries`, `raw_queries`, `attention`, `votes`
    and `above_average`. The last five raise SnapKVError if no queries were recorded.

    Entries are in order of position. MLA layers (`latent`) store latents and the positional part of keys. There, `keys`
    are both parts side by side, and `values` are the latents.

    Attributes:
        stored_keys, stored_values: `(B, n_kv_heads, T, head_dim)`, or the arrays of quantised entries.
        observed: the queries that vote; None if no queries were recorded.
        explicit_positions: uint32 `(B, n_kv_heads, T)`, positions in the prompt; None if these are the prompt's first
            `T` entries.
        received: `(B, n_kv_heads, T)` float32, attention received so far; None if it was not counted.
        quantization: quantisation of the stored entries; None if they are plain.
        layer: the `AttentionLayer`: `.attention` is mlx-lm's attention module, `.rope` its RoPE module or None,
            `.number` its index among the model's full-attention layers. If no layer was given, its attributes raise
            SnapKVError.
        statistics: `Statistics` of the queries; its attributes raise SnapKVError unless the policy asks for them.
        budget: number of entries to keep per KV head; None if unknown.
        n_window: number of newest entries that are always kept; None if unknown.
        shared_votes: votes computed earlier, by number of entries, indices of the queries, and counts.
        reads_allocate: whether reads allocate memory; if so, each block must be evaluated before the next is read.
    """

    stored_keys: Stored
    stored_values: Stored
    observed: Queries | None = None
    explicit_positions: mx.array | None = None
    received: mx.array | None = None
    quantization: Quantization | None = None
    layer: Any = None
    statistics: Any = None
    budget: int | None = None
    n_window: int | None = None
    shared_votes: dict[tuple[int, ...], mx.array] | None = None

    reads_allocate = False

    def __post_init__(self):
        """Replace a missing layer and missing statistics by objects whose attributes raise SnapKVError."""
        self.layer = self.layer or _NO_LAYER
        self.statistics = self.statistics or _NO_STATISTICS

    def __len__(self) -> int:
        """Return `T`, the number of entries per KV head."""
        return n_rows(self.stored_keys)

    def plain(self) -> tuple[mx.array, mx.array]:
        """Return the dequantised keys and values, `(B, n_kv_heads, T, ...)` each."""
        keys, values = self.stored_keys, self.stored_values
        return unpack(keys, self.quantization), unpack(values, self.quantization)

    @cached_property
    def keys(self) -> mx.array:
        """Return the vectors that are multiplied by queries, `(B, n_kv_heads, T, head_dim)`."""
        return self.read_keys(0, len(self))

    @cached_property
    def values(self) -> mx.array:
        """Return the vectors that the attention averages, `(B, n_kv_heads, T, head_dim)`."""
        return self.read_values(0, len(self))

    def read_keys(self, start: int, stop: int, after: Sequence[mx.array] = ()) -> mx.array:
        """Return the keys of entries `[start, stop)`. The arrays `after` are evaluated first."""
        keys = self._read(KEYS, start, stop, after)
        if not self.layer.latent:
            return keys
        # An MLA cache stores the positional part in place of values.
        positional = self._read(VALUES, start, stop)
        return mx.concatenate([keys, positional], axis=-1)

    def read_values(self, start: int, stop: int, after: Sequence[mx.array] = ()) -> mx.array:
        """Return the values of entries `[start, stop)`. The arrays `after` are evaluated first."""
        return self._read(KEYS if self.layer.latent else VALUES, start, stop, after)

    def _read(self, which: int, start: int, stop: int, after: Sequence[mx.array] = ()) -> mx.array:
        """Return the stored KEYS or VALUES of entries `[start, stop)`, dequantised."""
        stored = rows((self.stored_keys, self.stored_values)[which], start, stop)
        if after:
            stored = each(lambda x: mx.depends(x, list(after)), stored)
        return unpack(stored, self.quantization)

    def map_blocks(self, function: ByBlock, blocks: Iterable[tuple[int, int]]) -> mx.array:
        """Call `function(start, stop, after)` for each block, and join the results along axis 2.

        `after` contains the previous result. MLX evaluates it first, so that only one block takes memory.
        """
        parts: list[mx.array] = []
        for start, stop in blocks:
            parts.append(function(start, stop, parts[-1:]))
            if self.reads_allocate:
                mx.eval(parts[-1])
        return mx.concatenate(parts, axis=2)

    def keys_of_heads(self, heads: slice, after: Sequence[mx.array] = ()) -> mx.array:
        """Return the keys of some KV heads, `(B, n, T, head_dim)`. The arrays `after` are evaluated first."""
        of_heads = self._map(lambda x: mx.depends(x[:, heads], list(after)))
        return of_heads.read_keys(0, len(self))

    def key_reader(self) -> KeyReader:
        """Return a reader of all keys, which reads some KV heads at a time."""
        first_key = self.read_keys(0, 1)
        B, H, _, D = first_key.shape
        return KeyReader(shape=(B, H, len(self), D), dtype=first_key.dtype, read=self.keys_of_heads)

    def map_keys(self, function: Callable[[mx.array], mx.array], width: int = 0) -> mx.array:
        """Apply `function` to float32 keys, block by block, and join the results along axis 2.

        Args:
            function: takes keys `(B, n_kv_heads, n, head_dim)`.
            width: number of float32 values that `function` computes per key, which limits the size of a block.
        """

        def of_block(start: int, stop: int, after: list[mx.array]) -> mx.array:
            return function(self.read_keys(start, stop, after).astype(mx.float32))

        B, H, _, D = self.key_reader().shape
        size = block_size(4 * B * H * max(D, width))
        return self.map_blocks(of_block, spans(0, len(self), size))

    @cached_property
    def positions(self) -> mx.array:
        """Return the entries' positions in the prompt, uint32 `(B, n_kv_heads, T)`."""
        if self.explicit_positions is not None:
            return self.explicit_positions
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
        """Return the observed queries after RoPE, `(B, n_heads, n, head_dim)`."""
        return self.voters.vectors

    @cached_property
    def raw_queries(self) -> mx.array:
        """Return the observed queries before RoPE, `(B, n_heads, n, head_dim)` float32."""
        start = self.voters.start
        if start is None:
            # An index equals a position only if no entry has been evicted.
            if self.explicit_positions is not None:
                raise SnapKVError("a layer's queries have no positions: give Queries a start")
            start = self.voters.indices.start
        return self.layer.undo_rope(self.queries, start)

    @cached_property
    def attention(self) -> mx.array:
        """Compute the causal attention weights of each observed query, `(B, n_heads, n, T)` float32.

        With attention sinks, the weights of a query sum to less than 1.
        """
        return attention_weights(self.key_reader(), self.voters)

    @cached_property
    def votes(self) -> mx.array:
        """Sum `attention` over the queries and average it over a GQA group: `(B, n_kv_heads, T)` float32."""
        return self._votes_of_last(len(self.voters.indices))[0]

    def latest_votes(self, *counts: int) -> list[mx.array]:
        """Compute the votes of the last `n` queries for each `n` in `counts`, `(B, n_kv_heads, T)` float32 each.

        The same pass computes `votes`.
        """
        votes, *latest = self._votes_of_last(len(self.voters.indices), *counts)
        vars(self).setdefault("votes", votes)  # the cached property returns this value
        return latest

    def _votes_of_last(self, *counts: int) -> mx.array:
        """Return the votes of the last queries, `(len(counts), B, n_kv_heads, T)` float32, computed at most once."""
        shared = {} if self.shared_votes is None else self.shared_votes
        indices = self.voters.indices
        key = (len(self), indices.start, indices.stop, *counts)
        if key not in shared:
            shared[key] = latest_votes(self.key_reader(), self.voters, counts)
        return shared[key]

    @cached_property
    def above_average(self) -> mx.array:
        """Count the queries that give each entry at least the average weight, `(B, n_kv_heads, T)` float32."""
        return above_average(self.key_reader(), self.voters)

    def take(self, chosen: mx.array) -> Entries:
        """Select the entries at uint32 indices `chosen` `(B, n_kv_heads, n)`. The result has no queries."""
        indices = {3: chosen, 4: chosen[..., None]}  # number of axes -> indices
        taken = self._map(lambda x: mx.take_along_axis(x, indices[x.ndim], axis=2))
        return replace(taken, observed=None, shared_votes=None)

    def between(self, start: int, stop: int) -> Entries:
        """Return the entries `[start, stop)`. The indices of the queries do not change."""
        if (start, stop) == (0, len(self)):
            return self
        part = self._map(lambda x: x[:, :, start:stop])
        # Shared votes are stored by number of entries, so they would not match a later start.
        return part if start == 0 else replace(part, shared_votes=None)

    def _map(self, function: Callable[[mx.array], mx.array]) -> Entries:
        """Apply `function` to each array `(B, n_kv_heads, T, ...)`."""
        received = None if self.received is None else function(self.received)
        return replace(
            self,
            stored_keys=each(function, self.stored_keys),
            stored_values=each(function, self.stored_values),
            received=received,
            explicit_positions=function(self.positions),
        )

    def with_quantization(self, quantization: Quantization | None) -> Entries:
        """Return the entries with another quantisation; None dequantises them."""
        if quantization == self.quantization:
            return self
        keys, values = (pack(x, quantization) for x in self.plain())
        return replace(self, stored_keys=keys, stored_values=values, quantization=quantization)

    def release(self) -> None:
        """Drop keys, values, and everything computed from them, so that MLX can free the memory."""
        self.stored_keys = self.stored_values = None
        for name in ("keys", "values", "raw_queries", "attention", "votes", "above_average"):
            vars(self).pop(name, None)
