"""Sparse attention: all entries stay, and the prompt's chunks and the answer's tokens read few of them."""

from collections.abc import Callable
from functools import cached_property
from typing import Any, final

import mlx.core as mx

from ..caches.full_view import FullView
from ..caches.layers import AttentionLayer, copies_but_entries
from ..caches.reread import Reread
from ..caches.sparse import SparseKVCache
from ..caches.token_ranking import TokenRanking
from ..entries import key_index
from ..entries.entries import Entries
from ..entries.queries import Queries
from ..entries.selection import nan_scores
from ..models import attention_classes
from ..models.patch import recording
from ..planning.request_plan import Plan
from ..policies.budgets import Quota
from .decode import offload
from .pieces import Pieces
from .report import CompressionReport
from .shared_pages import most_attended, reread

AGAIN = 64  # of the prompt's latest tokens, which beyond the trained length are read again, as the answer's are
TOGETHER = 8  # of those, which choose together


@final
class SparseMode:
    """How sparse attention reads a prompt (with read="dense" it does not), and what the answer's tokens choose from.

    Beyond the trained length the question's tokens, too, have to read what they ask for where every head finds it: the
    prompt's latest tokens are read a second time, on the answer's caches, before its last one is.
    """

    def __init__(
        self,
        model: Any,
        plan: Plan,
        layers: list[AttentionLayer],
        prompt_cache: list,
        pieces: Pieces,
    ):
        self.plan, self.layers = plan, layers
        self._model, self._prompt_cache, self._pieces = model, prompt_cache, pieces
        # Caches without the latest tokens' part, but for entries, and those tokens `(1, n)` each.
        self._before_latest: list | None = None
        self._latest: list[mx.array] = []

    def read(self, inputs: mx.array, cache: list, compress: Callable[[], list]) -> mx.array:
        """The model's call for a chunk `(1, L)`, the last tokens of the prompt in a call of their own: they read more.

        Beyond the trained length the very last one is read on the answer's caches, if an answer follows.
        """
        everything = self.layers[-1].cache_in(self._prompt_cache)
        n = everything.offset
        logits = self._read(inputs, cache, compress)
        if everything.offset == n + inputs.shape[1]:
            everything.note_tokens(inputs[0])
        return logits

    def _read(self, inputs: mx.array, cache: list, compress: Callable[[], list]) -> mx.array:
        reading, n_prompt = self.plan.sparse_reading, self.plan.n_prompt
        if reading is None:
            return self._pieces(inputs, cache)
        first = self.layers[0].cache_in(cache)
        if first.reads_some:
            inputs = self._read_to(reading.last_from, inputs, cache)
        if self.plan.compacted_to is None:
            return self._pieces(inputs, cache)
        is_last = first.offset == n_prompt - 1 and not self.plan.options.is_text
        if is_last and first.everything.n_queries:  # or none could vote: the prompt is that token
            cache[:] = compress()
            return self._model(inputs, cache=cache)
        return self._read_latest(inputs, cache)

    def _read_to(self, position: int, inputs: mx.array, cache: list) -> mx.array:
        """Read a chunk up to a position within it, if there is one; the tokens that are left."""
        n = position - self.layers[0].cache_in(cache).offset
        if not 0 < n < inputs.shape[1]:
            return inputs
        self._pieces(inputs[:, :n], cache)
        mx.eval([c.state for c in cache])
        return inputs[:, n:]

    def _read_latest(self, inputs: mx.array, cache: list) -> mx.array:
        """Read tokens, and note those that are to be read again."""
        again_from = self.plan.n_prompt - AGAIN
        inputs = self._read_to(again_from, inputs, cache)
        if self.layers[0].cache_in(cache).offset >= again_from:
            if self._before_latest is None:
                self._before_latest = copies_but_entries(cache, self.layers)
            self._latest.append(inputs)
        return self._pieces(inputs, cache)

    def compress(self, caches: list, report: CompressionReport) -> None:
        """Replace `caches` by those whose tokens choose among all entries; nothing is evicted."""
        self._require_numbers()
        note_chunks(self.plan, self.layers, caches, report)
        caches[:] = copies_but_entries(self._before_latest or caches, self.layers)
        offload(self.layers, self._prompt_cache)
        latest = mx.concatenate(self._latest, axis=1) if self._latest else mx.zeros((1, 0))
        n = self.layers[0].cache_in(self._prompt_cache).offset - latest.shape[1]
        shared, rereads = self._shared(n)
        report.entries_kept, report.attention_share = [None] * len(caches), [None] * len(caches)
        for layer, again in zip(self.layers, rereads):
            cache = SparseKVCache(self._ranking(layer, self.plan.decode_quota, shared, n), again)
            layer.put(caches, cache)
            report.entries_kept[layer.index] = cache.n_entries - cache.n_means
            report.means = max(report.means, cache.n_means)
        report.no_means = self.no_means
        report.read_per_token = max(filter(None, report.entries_kept))
        with recording(attention_classes(self._model)):
            for start in range(0, latest.shape[1], TOGETHER):
                mx.eval(self._model(latest[:, start : start + TOGETHER], cache=caches))
        self._before_latest, self._latest = None, []

    def _require_numbers(self) -> None:
        """Raises: SnapKVError: attention has produced NaN, so that nothing can be chosen."""
        last = self.layers[-1].cache_in(self._prompt_cache)
        if last.n_queries and mx.isnan(last.queries).any().item():
            raise nan_scores()

    def full_view(self, layer: AttentionLayer) -> FullView:
        """All of a layer's entries, with an index that stays for later turns: of earlier ones, and what came since.

        A new one is for queries like the prompt's last, if those were recorded.
        """
        cache = layer.cache_in(self._prompt_cache)
        view = FullView(cache.views(), layer, self.plan.compaction)
        queries = cache.queries if cache.n_queries else None
        view.index = cache.index = view.grown_index(cache.index, queries)
        return view

    def _ranking(
        self, layer: AttentionLayer, quota: Quota, shared: mx.array | None, n: int
    ) -> TokenRanking:
        """What tokens that read `quota` entries choose from: the first `n`, all before the latest, but for those that
        are `shared` by all heads."""
        cache = layer.cache_in(self._prompt_cache)
        view = self.full_view(layer).beginning(n)
        ranking = TokenRanking(view, quota, shared, self.plan.n_prompt)
        if self.plan.policy.rest is not None and self.no_means is None and cache.n_queries:
            ranking.weigh_rest(self._voters(layer, view), cache.clusters)
        if ranking.rest is not None:
            cache.clusters = ranking.rest.clusters.whole_blocks()
        return ranking

    @cached_property
    def no_means(self) -> str | None:
        """Why tokens see nothing of what they don't read, though they were to; all layers do, or none, since mlx-lm
        makes one mask for them."""
        if self.plan.policy.rest is None:
            return None
        if self.plan.compacted_to is not None:
            return "beyond the trained length"
        if not all(map(TokenRanking.can_weigh, self.layers)):
            return "with latent, capped or borrowed attention"
        return None

    def _shared(self, n: int) -> tuple[mx.array | None, list[Reread | None]]:
        """Positions, among an answer's first `n` entries, that all heads read beyond the trained length, and what each
        layer has of them when their tokens are read again."""
        quota, shared = self.plan.decode_quota, None
        if self.plan.compacted_to is not None:
            shared = most_attended(self.layers, quota, n, self._voted)
        if shared is None:
            return None, [None] * len(self.layers)
        views = [self.full_view(layer) for layer in self.layers]
        ids = self.layers[-1].cache_in(self._prompt_cache).token_ids
        return shared, reread(self._model, views, ids, shared, quota.n_sink)

    def _voted(self, layer: AttentionLayer) -> Entries:
        """A layer's entries, with the prompt's last queries as they vote for those that a token reads."""
        view = self.full_view(layer)
        entries = view.voted_by(self._voters(layer, view))
        entries.budget = max(self.plan.decode_quota.entries, key_index.EXACT_ENTRIES)
        return entries

    def _voters(self, layer: AttentionLayer, view: FullView) -> Queries:
        """The prompt's last queries, as they vote over all of a layer's entries."""
        cache = layer.cache_in(self._prompt_cache)
        return cache.voters(cache.queries, cache.query_positions, view.blocks().shape)


def note_chunks(
    plan: Plan, layers: list[AttentionLayer], caches: list, report: CompressionReport
) -> None:
    """Note in the report how many earlier entries a chunk read at most, if chunks chose."""
    if plan.sparse_reading is not None:
        report.read_per_chunk = layers[0].cache_in(caches).n_read
