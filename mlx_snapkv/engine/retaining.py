"""Prompts whose entries all stay while the answer is decoded from those that a policy has chosen."""

from ..caches.full_view import FullView
from ..caches.layers import AttentionLayer, copies_but_entries, file_bytes
from .compress import Choice
from .readers import Request


class RetainingReader(Request):
    """Reads on the caller's own caches, which go on holding all entries; compressed copies serve the answer only."""

    def _prepare(self) -> None:
        plan = self.plan
        for layer in self.layers:
            cache = layer.cache_in(self.caches)
            cache.observe(plan.first, plan.last, plan.capacity, plan.statistics_from)
            cache.layer = layer

    def keep(self, choices: list[Choice]) -> None:
        small = copies_but_entries(self.caches, self.layers)
        self._replace(small, choices)
        self.caches[:] = small
        self.offload()

    def offload(self) -> None:
        """Put the prompt's entries to where they are kept; SnapKVError if there is no room, and some stay in memory."""
        for layer in self.layers:
            layer.cache_in(self.prompt_cache).offload()

    def full_view(self, layer: AttentionLayer) -> FullView:
        """All of a layer's entries, with an index that stays for later turns: of earlier ones, and what came since.

        A new one is for queries like the prompt's last, if those were recorded.
        """
        cache = layer.cache_in(self.prompt_cache)
        view = FullView(cache.views(), layer, self.plan.compaction)

        queries = cache.queries if cache.n_queries else None
        view.index = cache.index = view.grown_index(cache.index, queries)
        return view

    def begin_answer(self) -> None:
        super().begin_answer()
        self._count_staying()

    def _count_staying(self) -> None:
        kept = [layer.cache_in(self.prompt_cache) for layer in self.layers]
        self.report.kv_bytes_staying = sum(cache.kv_nbytes for cache in kept)
        self.report.file_bytes = file_bytes(self.prompt_cache)
