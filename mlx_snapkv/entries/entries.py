"""What one layer offers a policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import mlx.core as mx

from ..errors import Missing, SnapKVError
from .attention import KeyBlocks, above_average, attention_weights, block_size, latest_votes
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
    """What one layer offers a policy, by attribute, computed lazily and once.

    Besides the fields: `keys`, `values`, `positions`, `queries`, `raw_queries`, `attention`, `votes` and
    `above_average`; the last five are a SnapKVError without observed queries.

    Entries are in order of position, as a cache stores them. A layer with `latent` entries (MLA) stores latents and the
    positional part of keys: `keys` are then both, side by side, and `values` the latents.

    The layer is an `AttentionLayer`: `.attention`, the mlx-lm attention module; `.rope`, its RoPE module or None;
    `.number`, its place among the model's full-attention layers; and what computes with these. Asking for one of them
    is a SnapKVError if no layer was given, and so are statistics that the policy did not ask for.
    """

    stored_keys: Stored
    stored_values: Stored
    observed: Queries | None = None  # those that vote
    # `(B, n_kv_heads, T)` each: uint32 positions in the prompt, if some are missing; float32 attention received so far.
    given_positions: mx.array | None = None
    received: mx.array | None = None
    quantization: Quantization | None = None
    layer: Any = None
    statistics: Any = None  # `Statistics`
    budget: int | None = None  # entries that are to stay per KV head, if that is known
    n_window: int | None = None  # of the newest, that stay in any case, if that is known
    # Votes of the same queries, computed before, by numbers of entries, places and counts.
    shared_votes: dict[tuple[int, ...], mx.array] | None = None

    waits = False  # what is read takes memory of its own, and is to be used before more is read

    def __post_init__(self):
        self.layer = self.layer or _NO_LAYER
        self.statistics = self.statistics or _NO_STATISTICS

    def __len__(self) -> int:
        return n_rows(self.stored_keys)

    def plain(self) -> tuple[mx.array, mx.array]:
        """What the cache stores, `(B, n_kv_heads, T, ...)` each, not quantised."""
        keys, values = self.stored_keys, self.stored_values
        return unpack(keys, self.quantization), unpack(values, self.quantization)

    @cached_property
    def keys(self) -> mx.array:
        """`(B, n_kv_heads, T, head_dim)`: what queries are multiplied by."""
        return self.read_keys(0, len(self))

    @cached_property
    def values(self) -> mx.array:
        """`(B, n_kv_heads, T, head_dim)`: what the attention sums up."""
        return self.read_values(0, len(self))

    def read_keys(self, start: int, stop: int, after: Sequence[mx.array] = ()) -> mx.array:
        """The keys of `[start, stop)`, `(B, n_kv_heads, stop - start, head_dim)`, computed after what is given."""
        keys = self._read(KEYS, start, stop, after)
        if not self.layer.latent:
            return keys
        return mx.concatenate([keys, self._read(VALUES, start, stop)], axis=-1)

    def read_values(self, start: int, stop: int, after: Sequence[mx.array] = ()) -> mx.array:
        """The same of the values."""
        return self._read(KEYS if self.layer.latent else VALUES, start, stop, after)

    def _read(self, which: int, start: int, stop: int, after: Sequence[mx.array] = ()) -> mx.array:
        stored = rows((self.stored_keys, self.stored_values)[which], start, stop)
        stored = each(lambda x: mx.depends(x, list(after)), stored) if after else stored
        return unpack(stored, self.quantization)

    def by_block(self, function: ByBlock, blocks: Iterable[tuple[int, int]]) -> mx.array:
        """`function(start, stop, after)` of each block, the results joined along axis 2.

        Each is computed after the one before, with the memory of one.
        """
        parts: list[mx.array] = []
        for start, stop in blocks:
            parts.append(function(start, stop, parts[-1:]))
            if self.waits:
                mx.eval(parts[-1])
        return mx.concatenate(parts, axis=2)

    def blocks(self) -> KeyBlocks:
        """All keys, to be read a block at a time."""
        one = self.read_keys(0, 1)
        B, H, _, D = one.shape
        return KeyBlocks((B, H, len(self), D), one.dtype, self.read_keys, self.waits)

    def of_keys(self, function: Callable[[mx.array], mx.array], width: int = 0) -> mx.array:
        """`function` of the keys in float32, `by_block`, where it makes `width` numbers of each key."""
        B, H, _, D = self.blocks().shape
        size = block_size(4 * B * H * max(D, width))
        return self.by_block(
            lambda *block: function(self.read_keys(*block).astype(mx.float32)),
            spans(0, len(self), size),
        )

    @cached_property
    def positions(self) -> mx.array:
        """uint32 `(B, n_kv_heads, T)`: the entries' positions in the prompt."""
        if self.given_positions is not None:
            return self.given_positions
        shape = (*self.read_keys(0, 1).shape[:2], len(self))
        return mx.broadcast_to(mx.arange(len(self), dtype=mx.uint32), shape)

    @property
    def voters(self) -> Queries:
        if self.observed is None:
            raise SnapKVError(
                "a layer's queries are missing: pass queries=, or prefill with mlx_snapkv.prefill"
            )
        return self.observed

    @property
    def queries(self) -> mx.array:
        """`(B, n_heads, n, head_dim)`: the observed queries, post-RoPE."""
        return self.voters.heads

    @cached_property
    def raw_queries(self) -> mx.array:
        """`(B, n_heads, n, head_dim)` float32: the observed queries as they were before the layer's RoPE."""
        start = self.voters.start
        if start is None and self.given_positions is not None:
            raise SnapKVError("a layer's queries have no positions: give Queries a start")
        start = self.voters.places.start if start is None else start
        return self.layer.undo_rope(self.queries, start)

    @cached_property
    def attention(self) -> mx.array:
        """`(B, n_heads, n, T)` float32: every observed query's weights, causal, after the sinks' share."""
        return attention_weights(self.blocks(), self.voters)

    @cached_property
    def votes(self) -> mx.array:
        """`(B, n_kv_heads, T)` float32: `attention`, in blocks, summed over queries and averaged over a GQA group."""
        return self._votes_of_last(len(self.voters.places))[0]

    def latest_votes(self, *counts: int) -> list[mx.array]:
        """`votes` of the last queries alone, as many as each of the `counts`; those of all are made along with them."""
        votes, *latest = self._votes_of_last(len(self.voters.places), *counts)
        vars(self).setdefault("votes", votes)
        return latest

    def _votes_of_last(self, *counts: int) -> mx.array:
        shared = {} if self.shared_votes is None else self.shared_votes
        key = len(self), self.voters.places.start, self.voters.places.stop, *counts
        if key not in shared:
            shared[key] = latest_votes(self.blocks(), self.voters, counts)
        return shared[key]

    @cached_property
    def above_average(self) -> mx.array:
        """`(B, n_kv_heads, T)` float32: see `attention.above_average`."""
        return above_average(self.blocks(), self.voters)

    def taken(self, chosen: mx.array) -> Entries:
        """The chosen entries, uint32 `(B, n_kv_heads, n)`; without queries."""
        places = {3: chosen, 4: chosen[..., None]}
        some = self._of(lambda x: mx.take_along_axis(x, places[x.ndim], axis=2))
        return replace(some, observed=None, shared_votes=None)

    def between(self, start: int, stop: int) -> Entries:
        """The entries from `start` on, before `stop`; queries keep their places."""
        if (start, stop) == (0, len(self)):
            return self
        some = self._of(lambda x: x[:, :, start:stop])
        return replace(some, shared_votes=None if start else self.shared_votes)

    def _of(self, part: Callable[[mx.array], mx.array]) -> Entries:
        """Some of the entries: `part` of every array `(B, n_kv_heads, T, ...)`."""
        names = ("stored_keys", "stored_values", "received")
        held = {name: getattr(self, name) for name in names} | {"given_positions": self.positions}
        return replace(self, **{n: x if x is None else each(part, x) for n, x in held.items()})

    def packed(self, quantization: Quantization | None) -> Entries:
        """The same entries, stored so; those that are already stay as they are."""
        if quantization == self.quantization:
            return self
        keys, values = (pack(x, quantization) for x in self.plain())
        return replace(self, stored_keys=keys, stored_values=values, quantization=quantization)

    def release(self) -> None:
        """Don't keep keys, values and what was made of them alive any longer."""
        self.stored_keys = self.stored_values = None
        for name in ("keys", "values", "raw_queries", "attention", "votes", "above_average"):
            vars(self).pop(name, None)
