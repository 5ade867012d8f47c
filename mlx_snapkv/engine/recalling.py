"""Requests whose prompt's entries all stay, beside the few that the answer is decoded from."""

from dataclasses import dataclass, fields
from typing import Any

import mlx.core as mx

from ..caches.layers import AttentionLayer, copies_but_entries, kv_bytes, members, quotas_of
from ..caches.memories import in_files, require_memory
from ..caches.recollection import Recollection
from ..caches.refreshed import RefreshedKVCache
from ..errors import SnapKVError
from ..policies import Policy, Stages
from ..policies.budgets import Quota
from .checked import Checked
from .report import CompressionReport, Verified
from .request import Request
from .wrapper import Answered

VERIFY = ("all",)
REFRESH = ("token", "turn")
FAR = ("keep", "pull")


@dataclass(frozen=True)
class Recall:
    """What becomes of the entries that an answer is not decoded from, and what it does with them.

    Attributes:
        memory: one of `MEMORIES`.
        verify: "all": the answer's tokens are drafted, and checked on all entries. None: they are not.
        refresh: when an answer chooses among all entries: "token": every token anew, by an index of the keys. "turn":
            the prompt, for the whole answer.
        far: "pull": entries farther away than the model was trained to are seen from nearer. "keep": they are not.
            None: they are if a prompt is longer than that, and it is possible.

    Raises:
        SnapKVError: one of these is none of that, or they don't go together.
    """

    memory: str = "drop"
    verify: str | None = None
    refresh: str = "token"
    far: str | None = None

    def __post_init__(self):
        require_memory(self.memory)
        if self.refresh not in REFRESH:
            raise SnapKVError(f"refresh must be {' or '.join(REFRESH)}, got {self.refresh!r}")
        if self.far not in (None, *FAR):
            raise SnapKVError(f"far must be {' or '.join(FAR)}, got {self.far!r}")
        if self.verify is None:
            return
        if self.verify not in VERIFY:
            raise SnapKVError(f"verify must be {' or '.join(VERIFY)}, got {self.verify!r}")
        if self.memory == "drop":
            raise SnapKVError(
                f"verify={self.verify} asks entries that memory=drop does not keep: give memory=recall"
            )
        if in_files(self.memory):
            raise SnapKVError(
                f"verify=all reads all entries again and again, so they must be in memory, not memory={self.memory}: "
                "give memory=recall, recall:8bit or recall:4bit, or leave verify out"
            )

    @property
    def asks(self) -> bool:
        """Whether an answer goes on reading entries that its prompt did not choose."""
        return self.memory != "drop" and (self.verify is not None or self.refresh == "token")

    def require(self, policy: Policy | Stages | None) -> None:
        """Raises: SnapKVError: entries that stay can't be chosen from by this policy, or there is none to verify."""
        if policy is None and self.verify is not None:
            raise SnapKVError(
                f"verify={self.verify} needs a policy: without one the full cache answers anyway"
            )
        if self.memory == "drop" or policy is None:
            return
        _, decode_policy = policy.stages
        if decode_policy.repeats is not None:
            raise SnapKVError(
                f"{decode_policy.name} chooses once, whatever is asked, and memory={self.memory} keeps all entries for "
                "every question to choose from: use memory=drop, or a policy that votes, such as snapkv"
            )
        if any(stage.accumulates_attention for stage in policy.stages):
            raise SnapKVError(
                f"memory={self.memory} needs a policy that chooses by keys or by the last queries, "
                f"and {policy} counts the attention of all: take keydiff, for one, or memory=drop"
            )
        if policy.reads_in_blocks and decode_policy.lookahead:
            raise SnapKVError(
                f"lookahead={decode_policy.lookahead} decodes tokens on all entries, and {policy} holds but some of "
                "them: leave lookahead out"
            )


def recall_of(options: dict[str, Any]) -> Recall:
    """What keywords of `generate_step`, some of them or all, ask for."""
    names = (field.name for field in fields(Recall))
    return Recall(**{name: options[name] for name in names if name in options})


def require_verifiable(recall: Recall, n_caches: int, n_full: int) -> None:
    """Raises: SnapKVError: answers can't be verified so where `n_full` of a model's caches hold entries."""
    if recall.verify == "all" and n_full < n_caches:
        raise SnapKVError(
            f"verify=all takes tokens back, and {n_caches - n_full} of {n_caches} layers can't "
            "(linear or sliding-window attention): leave verify out"
        )


@dataclass
class RecallingRequest(Request):
    """One more turn on full caches that stay: its queries vote over all entries ever read.

    The caller's caches go on holding all entries, this turn's among them. The compressed ones, in `caches` after the
    compression, serve its answer only.

    Args:
        recall: when the answer's tokens choose, and whether they are verified.
    """

    recall: Recall = Recall("recall")

    def __post_init__(self):
        self._checked: Checked | None = None
        super().__post_init__()
        if self.recall.verify is not None:
            self._verified = Verified()
            self.loop_model = Answered(self.model)
        require_verifiable(self.recall, len(list(members(self.prompt_cache))), len(self._layers))

    def _prefill_caches(self) -> list:
        capacity = self.decision.at + self.decision.n_ahead + 1
        self.policy.prefill_quotas(self.decision.n_prompt, self._layers[0].n_layers)
        for layer in self._layers:
            cache = layer.cache_in(self.prompt_cache)
            cache.observe(self.decision.first, self.decision.last, capacity, self._statistics_from)
            cache.layer = layer
        return list(self.prompt_cache)

    @property
    def _refreshes(self) -> bool:
        """Whether tokens choose anew: not from entries to be quantised for the answer.

        Nor where a model itself reads its caches.
        """
        takes_itself = any(layer.family.method != "__call__" for layer in self._layers)
        return self.recall.refresh == "token" and self.quantization is None and not takes_itself

    @property
    def _reads_on(self) -> bool:
        """Whether the answer reads entries that the prompt did not choose."""
        return self._refreshes or self.recall.verify is not None

    @property
    def _observes_answer(self) -> bool:
        return super()._observes_answer or self._reads_on

    def _replace(self) -> CompressionReport:
        """Put compressed caches into `caches`, and the turn's entries to where they are kept.

        Raises:
            SnapKVError: there is no room for them there; some then stay in memory.
        """
        small = copies_but_entries(self.prompt_cache, self._layers)
        report = self._compressed(small)
        self.caches[:] = small
        if report.compressed:
            for layer in self._layers:
                layer.cache_in(self.prompt_cache).offload()
            self._answer_from_all(report)
        return report

    def _answer_from_all(self, report: CompressionReport) -> None:
        """Once `caches` hold what the prompt has chosen: let the answer read on in all entries, if it is to."""
        if self._reads_on:
            self._refresh(report)
        if self.recall.verify is not None:
            report.verified = self._verified
            self._verify()

    def _refresh(self, report: CompressionReport) -> None:
        """Let the answer's tokens choose anew."""
        quotas = quotas_of(self._layers, self.decode_policy.quotas, self.decision.n_prompt)
        for layer, quota in zip(self._layers, quotas):
            if self.decode_policy.adaptive:
                n = layer.entries_in(self.caches).n_entries
                quota = Quota(n, quota.n_sink, quota.n_window)
            layer.put(self.caches, self._refreshed(layer, quota))
        report.kv_bytes_after = kv_bytes(self.caches)
        report.refreshed = max(layer.entries_in(self.caches).n_entries for layer in self._layers)

    def _refreshed(self, layer: AttentionLayer, quota: Quota) -> RefreshedKVCache:
        everything = self._everything(layer)
        everything.index = everything.make_index(self._asking(layer))
        return RefreshedKVCache(everything, quota, layer)

    def _asking(self, layer: AttentionLayer) -> mx.array | None:
        """The prompt's last queries, each KV head's readers together, if they were recorded."""
        cache = layer.cache_in(self.prompt_cache)
        return cache.held(1).voters.heads if cache.n_queries else None

    def _everything(self, layer: AttentionLayer) -> Recollection:
        cache = layer.cache_in(self.prompt_cache)
        return Recollection(cache.sources(), layer, self.pull, cache.index)

    def _growing_caches(self) -> list:
        full = list(self.prompt_cache)
        for layer in self._layers:
            layer.put(full, layer.cache_in(self.prompt_cache).growing_cache())
        return full

    def _verify(self) -> None:
        """Let the answer's tokens be drafted on caches that choose anew, and checked on the full ones."""
        full, small = self._growing_caches(), list(self.caches)
        self._checked = Checked(self.model, full, small, self._verified)
        self.loop_model.answering = self._checked

    def end(self) -> None:
        if self._checked is not None:
            self._checked.close()
