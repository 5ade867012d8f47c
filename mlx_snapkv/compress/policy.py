"""The contract of a policy: what it asks of a layer's entries, and one score for each entry."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from ..entries.entries import Entries
from ..entries.quota import Quota
from ..errors import SnapKVError
from ..hyperparameters import Hyperparameters, amount, count, entry_count

POLICIES: dict[str, type[Policy]] = {}  # name -> policy; a subclass with a name registers itself


@dataclass(frozen=True, kw_only=True)
class Policy(Hyperparameters, ABC):
    """Base of the policies, each a frozen dataclass of hyper-parameters and a `score`.

    Attributes:
        budget: entries kept per KV head, as a number or a share of the prompt ("25%").
        n_sink: number of first entries, which are always kept.
        n_window: number of most recent entries, which are always kept, or a share of the budget ("10%").
        min_ctx: shorter prompts are not compressed.
        schedule: "block" evicts during prefill and decoding, whenever the next tokens would make more than
            `budget + block` entries. "once" reads the whole prompt before it evicts; during decoding the recent
            window slides, unless `on_full` says otherwise.
        block: under "block", the maximum number of tokens read at a time.
    """

    summary: ClassVar[str]  # the kept entries in a few words, for lists of policies
    paper: ClassVar[str]  # authors, year and arXiv number; "" if there is no paper
    schedules: ClassVar[tuple[str, ...]] = ("once", "block")

    # A policy that needs more than keys and values sets these.
    obs_window: ClassVar[int] = 0  # number of last queries that vote
    accumulates_attention: ClassVar[bool] = False  # all queries vote, see `Entries.received`
    # First position that counts in `Entries.statistics`; None: the policy needs no statistics.
    query_statistics: ClassVar[int | None] = None
    lookahead: ClassVar[int] = 0  # number of answer tokens that vote, decoded on all entries
    prefill_chunk: ClassVar[int | None] = None  # under "once"; None follows `prefill_step_size`
    on_full: ClassVar[str] = "slide"  # what happens under "once" when the recent window is full
    heads_agree: ClassVar[bool] = False  # all heads of a layer keep the same entries

    budget: int | str = entry_count(8192, least=1)
    n_sink: int = count(0)
    n_window: int | str = entry_count("10%")
    min_ctx: int = count(0)
    schedule: str = "block"
    block: int = count(512, least=1)

    def __init_subclass__(cls, registered: bool = True, **kwargs):
        """Register a policy that has a name of its own; SnapKVError if another policy has that name."""
        super().__init_subclass__(**kwargs)
        name = vars(cls).get("name")
        if name is None or not registered:
            return
        owner = POLICIES.setdefault(name, cls)
        if owner is not cls:
            raise SnapKVError(
                f"{cls.__qualname__} can't be named {name!r}: {owner.__qualname__} has that name"
            )

    def __post_init__(self):
        """Check the schedule, and a budget that is given as a number; `quota` checks a share."""
        super().__post_init__()
        if isinstance(self.budget, int):
            self._require_entries(self.budget)
        self._require("schedule", self.schedule in self.schedules, " or ".join(self.schedules))

    @abstractmethod
    def score(self, entries: Entries) -> mx.array:
        """Return `(B, n_kv_heads, T)` float32 scores, higher means keep, as a lazy graph."""

    @property
    def observes(self) -> bool:
        """Return whether the policy asks for queries, or for statistics computed from them."""
        votes = self.obs_window > 0 or self.accumulates_attention
        return votes or self.query_statistics is not None

    @property
    def observes_answer(self) -> bool:
        """Return whether queries of the answer vote, at the evictions of the "block" schedule."""
        return self.schedule == "block" and self.observes

    @property
    def grows(self) -> bool:
        """Return whether all of the answer's entries stay, in addition to the budget."""
        return self.schedule == "once" and self.on_full == "grow"

    @property
    def keeps_shape(self) -> bool:
        """Return whether the cache's shape is constant while an answer is decoded."""
        return self.schedule == "once" and not self.grows

    def window(self, budget: int) -> int:
        """Return the number of most recent entries that are always kept, out of `budget`."""
        return amount(self.n_window, budget)

    def quota(self, n_prompt: int) -> Quota:
        """Return the entries that each full-attention layer keeps of a prompt of `n_prompt` tokens.

        Raises: SnapKVError: the budget's share of the prompt is less than one entry.
        """
        n_entries = amount(self.budget, n_prompt)
        self._require_entries(n_entries)
        return self._quota_of(n_entries)

    def _quota_of(self, n_entries: int) -> Quota:
        """Return the quota of a budget of `n_entries`, with sink and window that fit in."""
        quota = Quota(entries=n_entries, n_sink=self.n_sink, n_window=self.window(n_entries))
        return quota.shrunk()

    def fits(self, n_prompt: int) -> bool:
        """Return whether a prompt of `n_prompt` tokens is within the budget."""
        return n_prompt <= amount(self.budget, n_prompt)

    def _require_entries(self, budget: int) -> None:
        """Check a number of entries. Raises: SnapKVError: it is 0, or leaves no room for a window that must slide."""
        if budget < 1:
            raise SnapKVError(
                f"{self.name} option budget={self.budget} is less than one entry of this prompt"
            )
        if self.keeps_shape:
            has_window = self._quota_of(budget).n_window >= 1
            allowed = "at least 1 entry with schedule=once, where the window slides"
            self._require("n_window", has_window, allowed)
