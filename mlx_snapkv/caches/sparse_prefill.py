"""The cache of a prompt that is read sparsely: nothing is evicted, and every chunk reads little of what came before it.

A chunk reads the sink, the tokens just before it, itself, and pages of neighbours that its own queries choose, for
each layer and KV head. A page is ranked by its mean key. QUOKA (arXiv:2602.08722), MInference (Jiang et al., 2024,
arXiv:2407.02490) and XAttention (Xu et al., 2025, arXiv:2503.16428) read prompts so on CUDA; here what was chosen is
gathered, so that a chunk is one ordinary call of the attention function.
"""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.cache import create_attention_mask

from ..entries.entries import Entries
from ..entries.quantization import join
from ..entries.queries import Captured
from ..policies.sparse import PAGE, Reach
from .choosing import Choosing
from .contract import LayerCache, keys_of
from .full_view import FullView
from .recording import RecordingKVCache

SAMPLED = 64  # queries of a chunk that rank the pages, or all of fewer


class SparsePrefillKVCache(Choosing, LayerCache):
    """Adds to a cache that holds all entries; each chunk reads some of them.

    Chunks that may read as many entries as there are read all of them. Those from position `last_from` on read what
    `last` says. Others choose among the entries `near` them, if that is given: beyond the trained length these stand
    where they are, and the sink before them.
    """

    keys = keys_of(lambda cache: cache.everything.growing)
    _reads_all = False  # the newest tokens did
    _again = False  # they came a second time
    n_read: int | None = None  # the most of those before it that a chunk has chosen to read

    def __init__(
        self,
        everything: RecordingKVCache,
        view: FullView,
        reach: Reach,
        last: Reach,
        last_from: float,
        near: int | None = None,
    ):
        self.everything, self.layer, self._view = everything, everything.layer, view
        self._reach, self._last, self._last_from, self._near = reach, last, last_from, near
        self._first = reach.n_sink // PAGE  # page that may be chosen
        self._means: mx.array | None = None  # of the keys of the first pages, float32
        self.offset = everything.offset

    def _pages(self, start: int) -> tuple[int, int, int]:
        """For a chunk from `start` on, the pages among which it may choose, from one to before another, and how many.

        It chooses none where it reads everything.
        """
        is_last = start >= self._last_from
        reach, first = self._last if is_last else self._reach, self._first
        stop, n = max(0, start - reach.n_window) // PAGE, reach.n_chosen // PAGE
        if self._near is not None and not is_last:
            first = max(first, -(-(start - self._near) // PAGE))
        is_all = first == self._first and stop - first <= n
        return first, stop, 0 if is_all else min(n, stop - first)

    @property
    def reads_some(self) -> bool:
        """Whether the next tokens do not read everything."""
        return self._pages(self.offset)[2] > 0

    def _n_read(self, start: int) -> int:
        """Entries that a chunk from `start` on reads of those before it."""
        _, stop, n = self._pages(start)
        return (self._first + n - stop) * PAGE + start if n else start

    @property
    def n_before_next(self) -> int:
        return self._n_read(self.offset)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self._again = self._chosen is not None
        self._reads_all = not self._again and self._pages(self.offset)[2] == 0
        if self._reads_all:
            self.move(keys.shape[2])
            return self.everything.update_and_fetch(keys, values)
        return super().update_and_fetch(keys, values)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        return self.everything.keys_and_values() if self._reads_all else super().keys_and_values()

    def move(self, n: int) -> None:
        self.offset += n

    def add(self, keys: mx.array, values: mx.array) -> None:
        self._own = keys, values
        self.everything.add(keys, values)

    def size(self) -> int:
        return self._n_read(self.offset - self._n_new) + self._n_new

    def record(self, captured: Captured) -> None:
        if captured.borrowed or not self._again:
            self.everything.record(captured)
        super().record(captured)

    @property
    def waits_for_readers(self) -> bool:  # type: ignore[override]
        return self.everything.waits_for_readers

    def choice(self, captured: Captured) -> tuple[mx.array, mx.array]:
        start = self.offset - self._n_new
        first, stop, n = self._pages(start)
        self.n_read = max(self.n_read or 0, self._n_read(start))
        pages = mx.sort(self._likeliest(captured, start, range(first, stop), n), axis=-1)
        chosen = (pages[..., None] * PAGE + mx.arange(PAGE, dtype=mx.uint32)).flatten(-2)
        ends = (
            mx.arange(self._first * PAGE, dtype=mx.uint32),
            mx.arange(stop * PAGE, start, dtype=mx.uint32),
        )
        sink, window = (mx.broadcast_to(x, (*chosen.shape[:2], x.size)) for x in ends)
        if first == self._first:
            places = mx.concatenate([sink, chosen, window], axis=-1)
            return join(self._view.lined_up(places, start, start).plain(), self._own)
        near = self._view.gather(mx.concatenate([chosen, window], axis=-1))
        return join(self._view.lined_up(sink, start, first * PAGE).plain(), near.plain(), self._own)

    def _likeliest(self, captured: Captured, start: int, among: range, n: int) -> mx.array:
        """The pages with the largest share of any query's attention, unordered uint32 `(B, n_kv_heads, n)`.

        It is the attention to the pages' mean keys, by sampled queries of all heads of a GQA group.
        """
        means = self._grown_means(among.stop)[:, :, among.start :]
        B, H, _, D = means.shape
        places = mx.arange(among.start * PAGE + PAGE // 2, among.stop * PAGE, PAGE)
        means = self._view.turned(means, mx.broadcast_to(places, (B, H, places.size)), start)
        queries = captured.heads[:, :, :: -max(1, self._n_new // SAMPLED)].astype(mx.float32)
        shares = _largest_shares(queries.reshape(B, H, -1, D) * captured.scale, means)
        best = mx.argpartition(-shares, n - 1, axis=-1)[..., :n]
        return best.astype(mx.uint32) + among.start

    def _grown_means(self, stop: int) -> mx.array:
        """Mean keys of the first `stop` pages."""
        done = 0 if self._means is None else self._means.shape[2]
        if stop > done:
            keys = self._view.read_keys(done * PAGE, stop * PAGE).astype(mx.float32)
            new = mx.unflatten(keys, 2, (-1, PAGE)).mean(axis=3)
            self._means = new if self._means is None else mx.concatenate([self._means, new], axis=2)
        return self._means  # type: ignore[return-value]

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None):
        n = self._n_read(self.offset)
        return create_attention_mask(N, n, return_array, window_size)

    @property
    def state(self) -> tuple:
        return *self.everything.state, self._means

    def held(self, n_queries: int = 0) -> Entries:
        return self.everything.held(n_queries)

    def rollback(self, n: int) -> None:
        self.everything.rollback(n)
        self.offset -= n
        self._means = None

    @property
    def full_nbytes(self) -> int:
        return self.everything.full_nbytes

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return self.everything.nbytes

    def empty(self) -> bool:
        return self.everything.empty()

    def is_trimmable(self) -> bool:
        return False


def _largest_shares(queries: mx.array, means: mx.array) -> mx.array:
    """Logarithms of the largest share of any query's attention that a page's mean key gets: `(B, n_kv_heads, pages)`.

    Queries `(B, n_kv_heads, n, head_dim)`, float32 and scaled, come a few at a time: the logits of all would take
    several times the memory of the means.
    """
    few = max(1, queries.shape[3] // 2)
    largest: list[mx.array] = []
    for start in range(0, queries.shape[2], few):
        logits = mx.depends(queries[:, :, start : start + few], largest) @ means.mT
        shares = (logits - mx.logsumexp(logits, axis=-1, keepdims=True)).max(axis=2)
        largest = [mx.maximum(shares, *largest) if largest else shares]
    return largest[0]
