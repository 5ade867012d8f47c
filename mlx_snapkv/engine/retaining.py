"""Prompts whose entries all stay while the answer is decoded from a few.

Out of core, a prompt is read within a fixed budget: through resident caches that evict block by block, after every
entry has been stored. When it has been read, its last queries vote over everything stored; the best entries are
gathered into small caches, the last tokens are read again over those, and the answer is decoded from them. Where every
token of the answer chooses anew what it reads, so do those last tokens, and nobody votes. The resident caches stay for
the next turn.
"""

import dataclasses

import mlx.core as mx

from ..caches.decode import decode_cache
from ..caches.full_view import FEW, FullView
from ..caches.layers import AttentionLayer, copies_but_entries, file_bytes
from ..caches.refreshed import RefreshedKVCache
from ..entries.entries import Entries
from ..policies.budgets import UNLIMITED, Quota
from .compress import Choice, Scored, score
from .readers import Request
from .report import Book, Verified
from .self_speculation import SelfSpeculation

PAGE, PAGES = 128, 4  # entries of a page that all heads read, and how many such pages
CHOOSING = 32  # tokens that are read again at most where they choose together: one set of entries must suit all


class RetainingReader(Request):
    """Reads on the caller's own caches, which go on holding all entries; compressed copies serve the answer only."""

    def _prepare(self, quotas: list[Quota]) -> None:
        capacity = self.plan.n_prompt + self.plan.n_ahead + 1
        for layer in self.layers:
            cache = layer.cache_in(self.caches)
            cache.observe(self.plan.first, self.plan.last, capacity, self.statistics_from)
            cache.layer = layer

    def choose(self) -> list[Choice]:
        return [] if self.refreshes else super().choose()

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
        view = FullView(cache.views(), layer, self.compaction)

        queries = cache.queries if cache.n_queries else None
        view.index = cache.index = view.grown_index(cache.index, queries)
        return view

    def begin_answer(self) -> None:
        """Unless the prompt has chosen for it, let every token of the answer choose anew among all entries."""
        super().begin_answer()
        if self.refreshes:
            self._let_choose()
        kept = [layer.cache_in(self.prompt_cache) for layer in self.layers]
        read = sum(cache.index_nbytes for cache in kept) if self.refreshes else 0
        self.report.kv_bytes_staying = sum(cache.kv_nbytes for cache in kept) - read
        self.report.file_bytes = file_bytes(self.prompt_cache)

    def _let_choose(self) -> None:
        for layer, quota in zip(self.layers, self.decode_quotas):
            cache = self.refreshed(layer, quota)
            layer.put(self.caches, cache)
            self.report.entries_kept[layer.index] = cache.n_entries - cache.n_means
            self.report.means = max(self.report.means, cache.n_means)
        self.report.refreshed = max(filter(None, self.report.entries_kept))
        if self.config.verify is not None:
            self.report.verified = Verified()
            caches = self.full_caches(), list(self.caches)
            self.hook = SelfSpeculation(self._model, *caches, self.report.verified)

    def end(self) -> None:
        if isinstance(self.hook, SelfSpeculation):
            self.hook.close()

    def refreshed(self, layer: AttentionLayer, quota: Quota) -> RefreshedKVCache:
        """A cache whose tokens choose `quota` entries anew among all."""
        view, cache = self.full_view(layer), layer.cache_in(self.prompt_cache)
        # All layers or none: mlx-lm makes one mask for them.
        weighs = cache.n_queries and all(map(RefreshedKVCache.can_weigh, self.layers))
        voters = cache.held(1).voters if weighs else None
        return RefreshedKVCache(view, quota, layer, observed=voters)

    def full_caches(self) -> list:
        full = list(self.prompt_cache)
        for layer in self.layers:
            layer.put(full, layer.cache_in(full).growing_cache())
        return full


class OutOfCoreReader(RetainingReader):
    """Reads over the entries that are resident, on caches that store all of them.

    The caller's caches go on with what is resident; `caches` serve the answer.
    """

    _shared: mx.array | None = None

    def _prepare(self, quotas: list[Quota]) -> None:
        policy = self.prefill_policy
        caches = [layer.cache_in(self.caches) for layer in self.layers]
        self._lacked_index = self.n_held > FEW and any(cache.index is None for cache in caches)
        for layer, quota in zip(self.layers, quotas):
            layer.cache_in(self.caches).limit(
                policy,
                quota,
                last=self.plan.last,
                newest=max(policy.obs_window, self.plan.n_voters, CHOOSING if self._length else 0),
                expected=self.plan.n_prompt,
                uniform=len(set(quotas)) == 1,
                layer=layer,
                compaction=self.compaction,
                statistics_from=self.statistics_from,
            )
        self.observes |= self.config.reads_on
        self.hook = self._read
        # What is read again is always kept, so that the others are as many as the budget has room for.
        most = min(policy.block, *(quota.n_window for quota in self.decode_quotas))
        self._n_again = min(self.n_new, min(most, CHOOSING) if self.refreshes else most)
        self._n_left = self.n_new
        self._again: list[mx.array] = []
        self._small: list = []

    @property
    def decode_quotas(self) -> list[Quota]:
        """With a window of at least the last token, which is read again.

        Beyond the trained length, tokens that choose read no more than half of it.
        """
        most = UNLIMITED if self._length is None else self._length // 2
        quotas = [
            Quota(min(q.entries, most), q.n_sink, q.n_window).shrunk()
            for q in super().decode_quotas
        ]
        return [Quota(max(q.entries, q.n_sink + 1), q.n_sink, max(1, q.n_window)) for q in quotas]

    @property
    def _length(self) -> int | None:
        """The trained length, where tokens choose among entries beyond it."""
        found = self.compaction
        if found is None or not self.refreshes or self.plan.n_prompt <= found.length:
            return None
        return found.length

    def _read(self, inputs: mx.array, cache: list) -> mx.array:
        """The model's call for tokens `(1, L)` of the prompt; when it gets the last, the answer's caches are made."""
        n_before = self._n_left - self._n_again
        self._n_left -= inputs.shape[1]
        if n_before > 0:
            before, inputs = inputs[:, :n_before], inputs[:, n_before:]
            logits = self._model(before, cache=cache)
            if inputs.shape[1] == 0:
                return logits
        if not self._again:
            mx.eval([c.state for c in cache])
            self._small = copies_but_entries(cache, self.layers)
        self._again.append(inputs)
        logits = self._model(inputs, cache=cache)
        if self._n_left:
            return logits
        mx.eval([c.state for c in cache])
        self.compress()
        self._small = []
        return self._logits

    def choose(self) -> list[Choice]:
        """Store what is resident only, and vote over everything, unless tokens choose by themselves."""
        resident = [layer.cache_in(self.prompt_cache) for layer in self.layers]
        self.offload()
        self.report.book = Book(
            resident=max(cache.n_entries for cache in resident),
            resident_bytes=sum(cache.nbytes for cache in resident),
            stored=self.plan.n_prompt,
            stored_bytes=sum(cache.store.nbytes for cache in resident),
            file_bytes=file_bytes(self.prompt_cache),
            read_again=self._n_again,
            index_made_again=self._lacked_index,
        )
        if self._length is not None:
            self._shared = self._most_attended()
        return super().choose()

    def keep(self, choices: list[Choice]) -> None:
        """Gather what was chosen, or let tokens choose, and read the last tokens over it."""
        uniform = len({choice.kept.shape[-1] for choice in choices}) == 1
        for layer, choice in zip(self.layers, choices):
            layer.put(self._small, self._gathered(layer, choice, uniform))
        if self.refreshes:
            for layer, quota in zip(self.layers, self.decode_quotas):
                layer.put(self._small, self._choosing(layer, quota))
        tokens = mx.concatenate(self._again, axis=1)
        # Where tokens choose, the last one does so alone: the answer's first follows from it.
        for part in [tokens[:, :-1], tokens[:, -1:]] if self.refreshes else [tokens]:
            if part.size:
                self._logits = self._logits_after(part, self._small)
        self.caches[:] = self._small
        for layer, choice in zip(self.layers, choices):
            layer.put(self.caches, self._answering(layer, choice, uniform))
        if self.config.verify is not None:
            full = self.full_caches()
            for layer in self.layers:
                layer.cache_in(full).trim(self._n_again)
            self._logits = self._logits_after(tokens, full)
        self._again = []

    def _most_attended(self) -> mx.array | None:
        """Positions of the pages that get the largest share of any head's attention by the prompt's last queries.

        Some heads point at what a question asks for (Wu et al., 2024, arXiv:2404.15574). The others need to read it
        there, too, and beyond the trained length they don't find it by themselves. None if there are too few pages.
        """
        quota, page = self.decode_quotas[0], mx.arange(PAGE)
        n_pages = min(PAGES, (quota.entries - quota.n_sink - quota.n_window) // 2 // PAGE)
        first = -(-quota.n_sink // PAGE)
        last = (self.plan.n_prompt - quota.n_window) // PAGE
        if n_pages < 1 or (last - first) * PAGE <= quota.entries:
            return None
        most = mx.zeros(last - first)
        for layer in self.layers:
            entries = self._voted(layer, CHOOSING)
            entries.budget = max(quota.entries, FEW)
            votes = mx.unflatten(entries.votes[..., first * PAGE : last * PAGE], -1, (-1, PAGE))
            pages = votes.sum(axis=-1)
            shares = pages / mx.maximum(pages.sum(axis=-1, keepdims=True), 1e-9)
            most = mx.maximum(most, layer.heads.max(shares.max(axis=(0, 1))))
            mx.eval(most)
        best = mx.sort(mx.argpartition(-most, n_pages - 1)[:n_pages]) + first
        return (best[:, None] * PAGE + page).flatten().astype(mx.uint32)

    def _voted(self, layer: AttentionLayer, n_voters: int) -> Entries:
        """All of a layer's entries, for which the last `n_voters` queries of the prompt vote."""
        voters = None
        if n_voters:
            voters = layer.cache_in(self.prompt_cache).held(n_voters).voters
            places = range(voters.start, voters.start + len(voters.places))
            voters = dataclasses.replace(voters, places=places)
        return self.full_view(layer).voted_by(voters)

    def _scored(self, layer: AttentionLayer, quota: Quota) -> Scored:
        policy, entries = self.decode_policy, self._voted(layer, self.plan.n_voters)
        if policy.query_statistics is not None:
            entries.statistics = layer.cache_in(self.prompt_cache).statistics
        found = score(entries, policy, quota)
        mx.eval(found.scores, found.votes)
        entries.release()
        return found

    def _gathered(self, layer: AttentionLayer, choice: Choice, uniform: bool) -> object:
        """A cache of what was chosen, but for the tokens to be read again."""
        at = self.plan.n_prompt - self._n_again
        kept = self.full_view(layer).gather(choice.kept[..., : -self._n_again], at)
        cache = decode_cache(
            layer, kept, at, self.decode_policy, choice.quota, uniform, reads_again=True
        )
        mx.eval(cache.state)
        return cache

    def _logits_after(self, tokens: mx.array, caches: list) -> mx.array:
        """Logits `(1, 1, vocab_size)` after tokens that are read on caches."""
        logits = self._model(tokens, cache=caches)[:, -1:]
        mx.eval(logits, [c.state for c in caches])
        return logits

    def _answering(self, layer: AttentionLayer, choice: Choice, uniform: bool) -> object:
        read = layer.cache_in(self._small)
        kept = read.held().packed(self.quantization)
        n_prompt, policy = self.plan.n_prompt, self.decode_policy
        small = decode_cache(layer, kept, n_prompt, policy, choice.quota, uniform)
        small.inherit(read)
        small.inherit_statistics(layer.cache_in(self.prompt_cache))
        mx.eval(small.state)
        return small

    def _choosing(self, layer: AttentionLayer, quota: Quota) -> RefreshedKVCache:
        """A cache whose tokens choose among all entries before those of the tokens that are read again."""
        views, index = layer.cache_in(self.prompt_cache).views(), self.full_view(layer).index
        n = self._n_again
        view = FullView(views, layer, self.compaction, index, self.plan.n_prompt - n)
        quota = Quota(quota.entries - n, quota.n_sink, quota.n_window - n)
        return RefreshedKVCache(view, quota, layer, self._shared)

    def refreshed(self, layer: AttentionLayer, quota: Quota) -> RefreshedKVCache:
        """With the entries of the tokens that were read again as they came out of that."""
        return layer.cache_in(self._small)

    def end(self) -> None:
        super().end()
        for layer in self.layers:
            cache = layer.cache_in(self.prompt_cache)
            cache.store.truncate(cache.offset)
