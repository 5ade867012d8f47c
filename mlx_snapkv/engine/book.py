"""Requests that read within a fixed budget, forget nothing, and let the question vote over all of it.

A prompt is read through resident caches that evict block by block, after every entry has been stored. When it has
been read, its last queries vote over everything stored; the best entries are gathered into small caches, the last
tokens are read again over those, and the answer is decoded from them. The resident caches stay for the next turn.
"""

import dataclasses
import time
from dataclasses import dataclass

import mlx.core as mx

from ..caches.decode import decode_cache
from ..caches.layers import (
    AttentionLayer,
    copies_but_entries,
    file_bytes,
    kv_bytes,
    kv_dtype,
    quotas_of,
)
from ..caches.recollection import Recollection
from ..caches.refreshed import RefreshedKVCache
from ..caches.stores import First
from ..entries.queries import Queries
from ..policies.budgets import Quota
from .choosing import Choice, Scored, choose_all, score, tell_kept
from .decision import Decision, decide
from .recalling import RecallingRequest
from .report import Book, CompressionReport
from .wrapper import Answered


@dataclass
class BookRequest(RecallingRequest):
    """A turn whose new tokens are read over the entries that are resident, on caches that store all of them.

    The caller's caches go on with what is resident; `caches` serve the answer.
    """

    def __post_init__(self):
        super().__post_init__()
        n_prompt = self.decision.n_prompt
        quotas = quotas_of(self._layers, self.decode_policy.quotas, n_prompt)
        # What is read again is always kept, so that the others are as many as the budget has room for.
        self._n_again = max(1, min(self.n_new, quotas[0].n_window, self.prefill_policy.block))
        self._quotas = [_with_window(quota, self._n_again) for quota in quotas]
        self._n_left = self.n_new
        self._again: list[mx.array] = []
        self._small: list = []
        self._report = CompressionReport(str(self.policy), n_prompt)
        self.loop_model = Answered(self.model)
        self.loop_model.answering = self._read

    def _decided(self) -> Decision:
        decision = decide(self.policy, self._held + self.n_new, self.n_new, all_held=True)
        return dataclasses.replace(decision, last=decision.at)

    @property
    def compresses_before_last_token(self) -> bool:
        return False

    @property
    def _observes(self) -> bool:
        return super()._observes or self.recall.asks

    def _prefill_caches(self) -> list:
        quotas = quotas_of(self._layers, self.policy.prefill_quotas, self.decision.n_prompt)
        for layer, quota in zip(self._layers, quotas):
            layer.cache_in(self.prompt_cache).limit(
                self.prefill_policy,
                quota,
                last=self.decision.last,
                newest=max(self.prefill_policy.obs_window, self.decision.n_voters),
                expected=self.decision.n_prompt,
                uniform=len(set(quotas)) == 1,
                layer=layer,
                compaction=self.pull,
                statistics_from=self._statistics_from,
            )
        return list(self.prompt_cache)

    def _read(self, inputs: mx.array, cache: list) -> mx.array:
        """The model's call for tokens `(1, L)` of the prompt; when it gets the last, the answer's caches are made."""
        n_before = self._n_left - self._n_again
        self._n_left -= inputs.shape[1]
        if n_before > 0:
            before, inputs = inputs[:, :n_before], inputs[:, n_before:]
            logits = self.model(before, cache=cache)
            if inputs.shape[1] == 0:
                return logits
        if not self._again:
            mx.eval([c.state for c in cache])
            self._small = copies_but_entries(cache, self._layers)
        self._again.append(inputs)
        logits = self.model(inputs, cache=cache)
        if self._n_left:
            return logits
        mx.eval([c.state for c in cache])
        self.prompt_is_read()
        return self._answered()

    def _answered(self) -> mx.array:
        """Vote, gather, and read again; logits `(1, 1, vocab_size)` after the prompt."""
        book = self._book()
        started = time.perf_counter()
        scored = map(self._scored, self._layers, self._quotas)
        chosen = choose_all(scored, self.decode_policy, self._quotas, self._layers[0].shard)
        voted = time.perf_counter()
        uniform = len({choice.kept.shape[-1] for choice in chosen}) == 1
        for layer, choice in zip(self._layers, chosen):
            self._gather(layer, choice, uniform)
        gathered = time.perf_counter()
        logits = self._read_again(chosen, uniform)
        book.vote_seconds, book.gather_seconds = voted - started, gathered - voted
        book.read_again_seconds = time.perf_counter() - gathered
        self._fill_report(chosen, book)
        return logits

    def _read_again(self, chosen: list[Choice], uniform: bool) -> mx.array:
        """Read the last tokens over what was gathered, and make the answer's caches; logits after the prompt."""
        tokens = mx.concatenate(self._again, axis=1)
        logits = self.model(tokens, cache=self._small)[:, -1:]
        mx.eval(logits, [c.state for c in self._small])
        self._settle(chosen, uniform)
        self.loop_model.answering = None
        if self.recall.verify is not None:
            logits = self._read_over_everything(tokens)
        self._answer_from_all(self._report)
        self._small, self._again = [], []
        return logits

    def _scored(self, layer: AttentionLayer, quota: Quota) -> Scored:
        """Everything scored, with the memory of one layer at a time."""
        entries = self._everything(layer).voted_by(self._voters(layer))
        if self.decode_policy.query_statistics is not None:
            entries.statistics = layer.cache_in(self.prompt_cache).statistics
        found = score(entries, self.decode_policy, quota)
        mx.eval(found.scores, found.votes)
        entries.release()
        return found

    def _voters(self, layer: AttentionLayer) -> Queries | None:
        n = self.decision.n_voters if self.decode_policy.obs_window else 0
        if not n:
            return None
        found = layer.cache_in(self.prompt_cache).held(n).voters
        first = found.start
        return dataclasses.replace(found, places=range(first, first + len(found.places)))

    def _gather(self, layer: AttentionLayer, choice: Choice, uniform: bool) -> None:
        """Put a cache of what was chosen, but for the tokens to be read again, in the layer's place."""
        at = self.decision.n_prompt - self._n_again
        kept = self._everything(layer).gather(choice.kept[..., : -self._n_again], at)
        wanted = at, self.decode_policy, choice.quota, uniform
        cache = decode_cache(layer, kept, choice.scores, *wanted, reads_again=True)
        mx.eval(cache.state)
        layer.put(self._small, cache)

    def _read_over_everything(self, tokens: mx.array) -> mx.array:
        full = self._growing_caches()
        for layer in self._layers:
            layer.cache_in(full).trim(self._n_again)
        logits = self.model(tokens, cache=full)[:, -1:]
        mx.eval(logits, [c.state for c in full])
        return logits

    def _settle(self, chosen: list[Choice], uniform: bool) -> None:
        """Let the answer's caches be what the policy decodes from."""
        at = self.decision.n_prompt
        self.caches[:] = self._small
        for layer, choice in zip(self._layers, chosen):
            kept = layer.cache_in(self._small).held()
            small = decode_cache(
                layer,
                kept.packed(self.quantization),
                choice.scores,
                at,
                self.decode_policy,
                choice.quota,
                uniform,
            )
            small.inherit(layer.cache_in(self._small))
            small.inherit_statistics(layer.cache_in(self.prompt_cache))
            mx.eval(small.state)
            layer.put(self.caches, small)

    def _everything(self, layer: AttentionLayer) -> Recollection:
        everything, cache = super()._everything(layer), layer.cache_in(self.prompt_cache)
        if cache.index is None:
            cache.index = everything.index = everything.make_index(self._asking(layer))
        return everything

    def _refreshed(self, layer: AttentionLayer, quota: Quota) -> RefreshedKVCache:
        """Over all entries but those of the tokens that were read again, which it gets as they came out of that."""
        (stored,) = layer.cache_in(self.prompt_cache).sources()
        n = self.decision.n_prompt - self._n_again
        index = self._everything(layer).index
        everything = Recollection([First(stored, n)], layer, self.pull, index)
        n_window = max(0, quota.n_window - self._n_again)
        most = max(quota.n_sink + n_window, quota.entries - self._n_again)
        quota = Quota(most, quota.n_sink, n_window)
        refreshed = RefreshedKVCache(everything, quota, layer)
        again = layer.cache_in(self._small).held()
        refreshed.append(again.between(len(again) - self._n_again, len(again)))
        return refreshed

    def _book(self) -> Book:
        """Where the entries are, once those that are resident only are stored, too."""
        caches = [layer.cache_in(self.prompt_cache) for layer in self._layers]
        for cache in caches:
            cache.offload()
        return Book(
            resident=max(cache.n_entries for cache in caches),
            resident_bytes=sum(cache.nbytes for cache in caches),
            stored=self.decision.n_prompt,
            stored_bytes=sum(cache.store.nbytes for cache in caches),
            file_bytes=file_bytes(self.prompt_cache),
            read_again=self._n_again,
        )

    def _fill_report(self, chosen: list[Choice], book: Book) -> None:
        report = self._report
        tell_kept(report, self.prompt_cache, self._layers, chosen)
        report.kv_bytes_after = kv_bytes(self.caches)
        report.kv_dtype = kv_dtype(self._layers[0].entries_in(self.caches))
        report.prefill_seconds = self._prefill_seconds or 0.0
        report.selection_seconds = book.vote_seconds + book.gather_seconds + book.read_again_seconds
        report.book, report.pulled_to = book, self.pulled_to

    def compress(self) -> CompressionReport:
        """What was done when the last token was read."""
        return self._report

    def end(self) -> None:
        super().end()
        for layer in self._layers:
            cache = layer.cache_in(self.prompt_cache)
            cache.store.truncate(cache.offset)


def _with_window(quota: Quota, n_window: int) -> Quota:
    n_window = max(quota.n_window, n_window)
    return Quota(max(quota.entries, quota.n_sink + n_window), quota.n_sink, n_window)
