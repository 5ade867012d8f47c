"""The cache of an answer whose every token chooses anew which entries it reads."""

from __future__ import annotations

import copy
from operator import attrgetter
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import create_attention_mask

from ..entries import rest as pages
from ..entries.attention import attention_votes
from ..entries.entries import Entries
from ..entries.quantization import n_bytes, rows
from ..entries.queries import Captured, Queries
from ..entries.rest import Example, Rest, best_factors, distances
from ..entries.selection import Top, n_of_groups, top_of_groups
from ..errors import TrimError
from ..policies.budgets import Quota
from .choosing import Choosing, biased
from .contract import LayerCache, keys_of
from .full_view import FullView
from .gathered import Gathered
from .stores import MemoryStore

RECENT = 512  # latest tokens that are read at most beside a small window; older ones are chosen from, half at a time


class SparseKVCache(Choosing, LayerCache):
    """Reads, at each token, the entries that its own queries rank highest, and the latest of the answer's.

    A token chooses among the prompt's entries, and among those of the answer that are not `RECENT` any more. Where the
    prompt is longer than its compaction allows, what a token reads stands in line before it: sink, chosen, shared,
    window; then all of the answer is read.
    """

    is_compressed = True
    keys = keys_of(attrgetter("_gathered"))

    def __init__(
        self,
        everything: FullView,  # of the prompt; its index ranks the entries, or if it has none, their exact votes
        quota: Quota,  # how many a token reads: sink, shared and window always, the rest by its queries
        layer: Any,
        # Ascending uint32 positions `(m,)` between sink and window, which every head reads.
        shared: mx.array | None = None,
        # The prompt's last queries, as they vote over all entries; for them the rest is weighed.
        observed: Queries | None = None,
    ):
        n = len(everything)
        self.offset = self._n_prompt = n
        self.layer = layer
        self._prompt = self._everything = everything
        self._answer: MemoryStore | None = None  # entries of the answer that are chosen from
        self._first = min(quota.n_sink, n)
        self._stop = max(self._first, n - quota.n_window)  # entries from here on are always read
        self._shared = mx.zeros(0, mx.uint32) if shared is None else shared
        n_late = n - self._stop + self._shared.size
        self._end = n - n_late  # of the places of those that are chosen
        self._n_chosen = max(0, quota.entries - quota.n_sink - n_late)
        self._most_recent = max(RECENT, quota.n_window + RECENT // 2)
        self._gathered = (
            Gathered()
        )  # every token reads sink, shared, window and the answer's recent entries
        if n:
            late = mx.concatenate([self._shared, mx.arange(self._stop, n, dtype=mx.uint32)])
            first = mx.arange(self._first, dtype=mx.uint32)
            shape = everything.blocks().shape[:2]
            for places, end in ((first, self._end - self._n_read()), (late, n)):
                places = mx.broadcast_to(places, (*shape, places.size))
                self.append(everything.lined_up(places, n, end))
            self.offset = n
        self._rest = None if observed is None else self._weighed_rest(observed, quota.n_window)
        self.n_seen = self.size()  # entries that the last token saw

    def _weighed_rest(self, observed: Queries, n_window: int) -> Rest | None:
        """The means of what a token does not read, weighed for the prompt's last queries.

        None where a token reads everything, or its attention function can't be told how to weigh.
        """
        if not self.can_weigh(self.layer) or self._n_read() in (0, self._stop - self._first):
            return None
        means = pages.means(self._everything, 0)
        errors, asked = mx.array(0.0), observed.latest(pages.FITTED)
        for i in range(len(asked.places)):
            one = asked.between(i, i + 1)
            example = Example(
                one.heads * one.scale, self._would_read(one, n_window), one.places.start, one.sinks
            )
            errors = errors + distances(self._everything, means, example)
            mx.eval(errors)
        return Rest(*means, *best_factors(errors))

    @staticmethod
    def can_weigh(layer: Any) -> bool:
        """Whether a layer's attention function takes a bias for each of its query heads."""
        family = layer.family
        return family.asks_to_hide and not (family.tiled or layer.borrowers or layer.cap)

    def _would_read(self, one: Queries, n_window: int) -> mx.array:
        """Which entries a token of the prompt would read, bool `(B, n_kv_heads, 1, n)`, as one of the answer does."""
        own, every = one.places.start, mx.arange(len(self._everything))
        stop = max(self._first, own - n_window)
        read = (every < self._first) | ((every >= stop) & (every <= own))
        shape = self._everything.blocks().shape[:2]
        read = mx.broadcast_to(read, (*shape, every.size))
        if stop > self._first:
            places = self._likeliest(one, stop).places
            read = mx.put_along_axis(read, places, mx.array(True), axis=-1)
        return read[:, :, None]

    def __deepcopy__(self, memo: dict) -> SparseKVCache:
        """A copy that chooses from the same entries of the prompt."""
        other = copy.copy(self)
        other._gathered = copy.deepcopy(self._gathered, memo)
        if self._answer is not None:
            other._answer = MemoryStore(cache=copy.deepcopy(self._answer.cache, memo))
            other._everything = self._prompt.followed_by(other._answer)
            other._everything.index = copy.deepcopy(self._everything.index)
        return other

    def move(self, n: int) -> None:
        self.offset += n

    def add(self, keys: mx.array, values: mx.array) -> None:
        self._gathered.append(keys, values)

    def append(self, entries: Entries) -> None:
        """Add entries that were made elsewhere, of the next tokens: they are always read."""
        self._gathered.append(*entries.plain())
        self._seen = self._gathered.always()
        mx.eval(self._seen)
        self.offset += len(entries)

    def choice(self, captured: Captured) -> tuple[mx.array, mx.array]:
        heads, scale, sinks, *_ = captured
        self.n_seen = self.size()
        if self._n_chosen == 0 or self._first == self._stop:
            return self._gathered.always()
        tokens = range(self.offset - heads.shape[2], self.offset)
        asked = self._everything.asked_by(Queries(heads, tokens, scale, sinks, cap=self.layer.cap))
        top = self._likeliest(asked, self._stop)
        if self._rest is not None:
            self.bias = self._rest.bias(heads * scale, top.others)
        found = self._gathered.read(self._read(top.places, tokens.start).plain(), self._rest)
        if self._n_recent > self._most_recent and not self._everything.is_far(self.offset):
            self._move_recent(RECENT // 2)
        return found

    def _likeliest(self, asked: Queries, stop: int) -> Top:
        """The places between sink and `stop` that queries attend to most, by KV head."""
        index = self._everything.index
        if index is not None:
            scores = index.relevance(asked, stop)
        else:
            scores = -1 / attention_votes(self._everything.blocks(), asked)
        if self._shared.size:
            scores = scores.at[..., self._shared].add(-mx.inf)
        middle = scores[..., self._first : stop]
        return top_of_groups(middle, self._n_chosen, self._first, len(self._everything))

    def _read(self, places: mx.array, start: int) -> Entries:
        """The entries at these places as a token at `start` sees them, in order only if some are too far."""
        if self._everything.is_far(start):
            places = mx.sort(places, axis=-1)
        return self._everything.lined_up(places, start, self._end)

    @property
    def _n_recent(self) -> int:
        """The latest entries of prompt and answer, which every token reads."""
        return self._gathered.n - self._first - self._shared.size

    def _move_recent(self, n: int) -> None:
        """From now on tokens choose among the oldest `n` entries of the window and the answer, too."""
        start = self._first + self._shared.size
        held = self._gathered.always()
        n_new = max(
            0, self._stop + n - len(self._everything)
        )  # of the answer's, which is not in the view
        if n_new:
            self._extend_view(Entries(*rows(held, start + n - n_new, start + n)))
        self._gathered.remove(start, n)
        self._stop += n

    def _extend_view(self, entries: Entries) -> None:
        if self._answer is None:
            self._answer = MemoryStore()
            index = self._prompt.index
            self._everything = self._prompt.followed_by(self._answer)
            self._everything.index = copy.deepcopy(index)
        n = len(self._everything)
        self._answer.append(entries)
        if (index := self._everything.index) is not None:
            index.append(self._everything.read_keys(n, len(self._everything)))
        if self._rest is not None:
            self._rest = self._rest.extended(self._everything, n)

    def hide(self, queries: mx.array, keys: mx.array, mask: Any) -> Any:
        """The mask of the attention function's call, with the bias of the rest's pages in it."""
        if self.bias is None:
            return mask
        return biased(self.bias, keys.shape[2], queries.dtype, mask)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None):
        return create_attention_mask(N, self.n_entries, return_array, window_size)

    @property
    def state(self) -> tuple:
        return self._gathered.keys, self._gathered.values

    def held(self, n_queries: int = 0) -> Entries:
        """Those that every token reads."""
        return Entries(*self._gathered.always())

    def size(self) -> int:
        return self.n_means + self._n_read() + self._gathered.n

    @property
    def n_means(self) -> int:
        """Of the entries that a token reads, means of what it does not read."""
        return 0 if self._rest is None else self._rest.n_pages

    def _n_read(self) -> int:
        """Chosen entries that a token reads."""
        n = self._stop - self._first
        return n_of_groups(n, self._n_chosen, len(self._everything)) if self._n_chosen else 0

    @property
    def n_after_next(self) -> int:
        return self.n_entries + 1

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of what a token reads, the index among it."""
        if self._gathered.keys is None:
            return 0
        one, index = n_bytes(rows(self._gathered.always(), 0, 1)), self._everything.index
        return one * self.n_entries + (0 if index is None else index.nbytes)

    def empty(self) -> bool:
        return False

    def is_trimmable(self) -> bool:
        return False

    def rollback(self, n: int) -> None:
        if n > min(self.offset - self._n_prompt, self._n_recent):
            raise TrimError("only an answer's latest tokens can be rolled back")
        self._gathered.trim(n)
        self.offset -= n
