"""One layer's KV entries, with everything that a policy can use to score them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import mlx.core as mx

from ..errors import Missing, SnapKVError
from .attention import (
    FLOAT_BYTES,
    KeyReader,
    attention_weights,
    count_above_average,
    entries_per_block,
    latest_votes,
)
from .quantization import (
    KEYS,
    VALUES,
    Quantization,
    Stored,
    count_rows,
    map_arrays,
    pack,
    slice_rows,
    unpack,
)
from .queries import Queries
from .quota import Quota
from .spans import spans

BlockFunction = Callable[[int, int, list[mx.array]], mx.array]

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
    """One layer's KV entries, for a policy to score.

    Besides the attributes, a policy can use these properties, which are computed on first use:

    - `keys`, `values` and `positions`.
    - `queries`, `raw_queries`, `attention`, `votes` and `above_average`. They raise SnapKVError if no queries were
      recorded.

    Entries are in order of position. MLA layers (`layer.latent`) store latents and positional keys: `keys` concatenates
    the two, and `values` are the latents.

    Attributes:
        stored_keys, stored_values: `(B, n_kv_heads, T, head_dim)` each, or the arrays of quantised entries.
        voting_queries: the queries that vote, or None if no queries were recorded.
        explicit_positions: uint32 `(B, n_kv_heads, T)`, positions in the prompt. None means the first `T` positions.
        received_attention: `(B, n_kv_heads, T)` float32, attention received so far, or None if it was not counted.
        quantization: quantisation of the stored entries, or None if they are plain.
        layer: the `AttentionLayer`. `.attention` is mlx-lm's attention module, `.rope` is the layer's RoPE or None, and
            `.number` is the layer's index among this process's full-attention layers. If the layer is missing, these
            attributes raise SnapKVError.
        statistics: `Statistics` of the prompt's queries read so far. If the policy does not request statistics, the
            attributes of `statistics` raise SnapKVError.
        quota: numbers of entries to keep per KV head, or None if unknown.
        shared_votes: votes computed so far, keyed by number of entries, query indices and voter counts. Copies of a
            prompt's cache share them (see `RecordingKVCache`). None if they are not shared.
        reads_allocate: whether reading entries allocates memory. If so, each block is evaluated before the next one is
            read.
    """

    stored_keys: Stored
    stored_values: Stored
    voting_queries: Queries | None = None
    explicit_positions: mx.array | None = None
    received_attention: mx.array | None = None
    quantization: Quantization | None = None
    layer: Any = None
    statistics: Any = None
    quota: Quota | None = None
    shared_votes: dict[tuple[int, ...], mx.array] | None = None

    reads_allocate = False

    def __post_init__(self):
        """Replace a missing layer or missing statistics with an object whose attributes raise SnapKVError."""
        self.layer = self.layer or _NO_LAYER
        self.statistics = self.statistics or _NO_STATISTICS

    def __len__(self) -> int:
        """Return `T`, the number of entries per KV head."""
        return count_rows(self.stored_keys)

    def dequantized(self) -> tuple[mx.array, mx.array]:
        """Return the dequantised keys and values, `(B, n_kv_heads, T, ...)` each."""
        keys, values = self.stored_keys, self.stored_values
        return unpack(keys, self.quantization), unpack(values, self.quantization)

    @cached_property
    def keys(self) -> mx.array:
        """Return the vectors that queries are multiplied by, `(B, n_kv_heads, T, head_dim)`."""
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
        # An MLA cache stores the positional keys where other caches store values.
        positional = self._read(VALUES, start, stop)
        return mx.concatenate([keys, positional], axis=-1)

    def read_values(self, start: int, stop: int, after: Sequence[mx.array] = ()) -> mx.array:
        """Return the values of entries `[start, stop)`. The arrays `after` are evaluated first."""
        return self._read(KEYS if self.layer.latent else VALUES, start, stop, after)

    def _read(self, which: int, start: int, stop: int, after: Sequence[mx.array] = ()) -> mx.array:
        """Return the dequantised KEYS or VALUES of entries `[start, stop)`."""
        stored = slice_rows((self.stored_keys, self.stored_values)[which], start, stop)
        if after:
            stored = map_arrays(lambda array: mx.depends(array, list(after)), stored)
        return unpack(stored, self.quantization)

    def map_blocks(self, function: BlockFunction, blocks: Iterable[tuple[int, int]]) -> mx.array:
        """Call `function(start, stop, after)` for each block and concatenate the results along axis 2.

        `after` contains the previous block's result. MLX evaluates it first, so only one block is in memory at a time.
        """
        results: list[mx.array] = []
        for start, stop in blocks:
            results.append(function(start, stop, results[-1:]))
            if self.reads_allocate:
                mx.eval(results[-1])
        return mx.concatenate(results, axis=2)

    def keys_of_heads(self, kv_heads: slice, after: Sequence[mx.array] = ()) -> mx.array:
        """Return all keys of the given KV heads, `(B, n, T, head_dim)`. The arrays `after` are evaluated first."""
        entries_of_heads = self._map_arrays(
            lambda array: mx.depends(array[:, kv_heads], list(after))
        )
        return entries_of_heads.read_keys(0, len(self))

    def key_reader(self) -> KeyReader:
        """Return a `KeyReader` that reads the keys of a few KV heads at a time."""
        first_key = self.read_keys(0, 1)
        B, H, _, D = first_key.shape
        return KeyReader(shape=(B, H, len(self), D), dtype=first_key.dtype, read=self.keys_of_heads)

    def map_keys(self, function: Callable[[mx.array], mx.array], width: int = 0) -> mx.array:
        """Apply `function` to the float32 keys block by block, and concatenate the results along axis 2.

        Args:
            function: takes keys `(B, n_kv_heads, n, head_dim)`.
            width: number of float32 values that `function` computes per key. More values mean smaller blocks.
        """

        def map_block(start: int, stop: int, previous_result: list[mx.array]) -> mx.array:
            # Don't assign the original keys to a variable, or they will stay in memory beside their float32 copy.
            keys = self.read_keys(start, stop, after=previous_result).astype(mx.float32)
            return function(keys)

        B, n_kv_heads, _, head_dim = self.key_reader().shape
        bytes_per_key = FLOAT_BYTES * B * n_kv_heads * max(head_dim, width)
        block_size = entries_per_block(bytes_per_key)
        return self.map_blocks(map_block, spans(0, len(self), block_size))

    @cached_property
    def positions(self) -> mx.array:
        """Return the entries' positions in the prompt, uint32 `(B, n_kv_heads, T)`."""
        if self.explicit_positions is not None:
            return self.explicit_positions
        B, H, _, _ = self.read_keys(0, 1).shape
        return mx.broadcast_to(mx.arange(len(self), dtype=mx.uint32), (B, H, len(self)))

    @property
    def voters(self) -> Queries:
        """Return the queries that vote. Raises: SnapKVError: no queries were recorded."""
        if self.voting_queries is None:
            raise SnapKVError(
                "a layer's queries are missing: pass queries=, or prefill with mlx_snapkv.prefill"
            )
        return self.voting_queries

    @property
    def queries(self) -> mx.array:
        """Return the voting queries after RoPE, `(B, n_heads, n, head_dim)`."""
        return self.voters.vectors

    @cached_property
    def raw_queries(self) -> mx.array:
        """Return the voting queries before RoPE, `(B, n_heads, n, head_dim)` float32.

        Raises: SnapKVError: no queries were recorded, their positions are unknown, or the layer is missing.
        """
        start = self.voters.start
        if start is None:
            # Indices are positions only as long as no entry has been evicted.
            if self.explicit_positions is not None:
                raise SnapKVError("a layer's queries have no positions: give Queries a start")
            start = self.voters.indices.start
        return self.layer.undo_rope(self.queries, start)

    @cached_property
    def attention(self) -> mx.array:
        """Compute the causal attention weights of the voting queries, `(B, n_heads, n, T)` float32.

        With attention sinks, a query's weights sum to less than 1.
        """
        return attention_weights(self.key_reader(), self.voters)

    @cached_property
    def votes(self) -> mx.array:
        """Sum `attention` over the queries and average over each GQA group: `(B, n_kv_heads, T)` float32."""
        return self._votes_of_last(len(self.voters.indices))[0]

    def latest_votes(self, *voter_counts: int) -> list[mx.array]:
        """Compute the votes of the last `n` queries for each `n` in `voter_counts`, `(B, n_kv_heads, T)` float32 each.

        `votes` is computed in the same pass.
        """
        n_queries = len(self.voters.indices)
        votes, *latest = self._votes_of_last(n_queries, *voter_counts)
        vars(self).setdefault("votes", votes)  # fills the cached property
        return latest

    def _votes_of_last(self, *voter_counts: int) -> mx.array:
        """Return `latest_votes` as one array, `(len(voter_counts), B, n_kv_heads, T)` float32, reusing shared votes."""
        votes_by_key = {} if self.shared_votes is None else self.shared_votes
        indices = self.voters.indices
        key = (len(self), indices.start, indices.stop, *voter_counts)
        if key not in votes_by_key:
            votes_by_key[key] = latest_votes(self.key_reader(), self.voters, voter_counts)
        return votes_by_key[key]

    @cached_property
    def above_average(self) -> mx.array:
        """Count, for each entry, the queries that give it at least the average weight.

        Returns: `(B, n_kv_heads, T)` float32.
        """
        return count_above_average(self.key_reader(), self.voters)

    def take(self, indices: mx.array) -> Entries:
        """Select the entries at uint32 `indices` `(B, n_kv_heads, n)`. The result has no queries."""
        # Keys and values are 4-D. Positions and received attention are 3-D.
        indices_by_ndim = {3: indices, 4: indices[..., None]}
        selected_entries = self._map_arrays(
            lambda array: mx.take_along_axis(array, indices_by_ndim[array.ndim], axis=2)
        )
        return replace(selected_entries, voting_queries=None, shared_votes=None)

    def between(self, start: int, stop: int) -> Entries:
        """Return the entries `[start, stop)`. Query indices still refer to the original entries."""
        if (start, stop) == (0, len(self)):
            return self
        part = self._map_arrays(lambda array: array[:, :, start:stop])
        # Shared votes are stored by number of entries, not by `start`, so they are valid only if `start` is 0.
        return part if start == 0 else replace(part, shared_votes=None)

    def _map_arrays(self, function: Callable[[mx.array], mx.array]) -> Entries:
        """Apply `function` to each array `(B, n_kv_heads, T, ...)`."""
        received_attention = self.received_attention
        if received_attention is not None:
            received_attention = function(received_attention)
        return replace(
            self,
            stored_keys=map_arrays(function, self.stored_keys),
            stored_values=map_arrays(function, self.stored_values),
            received_attention=received_attention,
            explicit_positions=function(self.positions),
        )

    def with_quantization(self, quantization: Quantization | None) -> Entries:
        """Return the entries with the given quantisation, or dequantised if it is None."""
        if quantization == self.quantization:
            return self
        keys, values = self.dequantized()
        return replace(
            self,
            stored_keys=pack(keys, quantization),
            stored_values=pack(values, quantization),
            quantization=quantization,
        )

    def release(self) -> None:
        """Drop the keys, the values and cached results such as `votes`, so that MLX can free the memory."""
        self.stored_keys = self.stored_values = None
        for name in ("keys", "values", "raw_queries", "attention", "votes", "above_average"):
            vars(self).pop(name, None)
