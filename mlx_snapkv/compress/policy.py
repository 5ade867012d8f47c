"""The base class for eviction policies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from ..entries.entries import Entries
from ..entries.quota import Quota
from ..errors import SnapKVError
from ..hyperparameters import Hyperparameters, amount, count, entry_count, option

POLICIES: dict[str, type[Policy]] = {}  # name -> class, filled by `Policy.__init_subclass__`


@dataclass(frozen=True, kw_only=True)
class Policy(Hyperparameters, ABC):
    """Base class for policies: a frozen dataclass of hyper-parameters with a `score` method.

    Attributes:
        budget: number of entries to keep per KV head, or a share of the prompt ("25%").
        n_sink: number of initial entries that are always kept.
        n_window: number of recent entries that are always kept, or a share of the budget ("10%").
        min_ctx: minimum prompt length in tokens. Nothing is evicted from shorter prompts.
        schedule: "block" evicts during prefill and decoding, whenever the next tokens would not fit in `budget + block`
            entries. "once" evicts after the whole prompt has been read. While the answer is decoded, each new entry
            then replaces the oldest one in the recent window, unless `on_full` is "grow", the default of `snapkv`.
        block: with schedule="block", the maximum number of tokens read at a time.
    """

    summary: ClassVar[str]  # short description of the entries that are kept
    paper: ClassVar[str]  # authors, year and arXiv number, or an empty string

    # Defaults that subclasses may override:

    # Number of recent queries that vote. With schedule="block", only the queries in the recent window vote.
    obs_window: ClassVar[int] = 0
    accumulates_attention: ClassVar[bool] = False  # whether all queries vote
    # Position where `Entries.statistics` start, or None if the policy needs no statistics.
    query_statistics: ClassVar[int | None] = None
    lookahead: ClassVar[int] = 0  # number of answer tokens whose queries also vote
    prefill_chunk: ClassVar[int | None] = None  # tokens; None means `prefill_step_size`
    on_full: ClassVar[str] = "slide"  # or "grow"; used only with schedule="once"
    heads_agree: ClassVar[bool] = False  # whether all heads of a layer keep the same positions

    budget: int | str = entry_count(8192, least=1)
    n_sink: int = count(0)
    n_window: int | str = entry_count("10%")
    min_ctx: int = count(0)
    schedule: str = option("block", ("once", "block").__contains__, "once or block")
    block: int = count(512, least=1)

    def __init_subclass__(cls, registered: bool = True, **kwargs):
        """Register the policy if it defines a name. Raises: SnapKVError: the name is taken by another policy."""
        super().__init_subclass__(**kwargs)
        name = vars(cls).get("name")
        if name is None or not registered:
            return
        registered_class = POLICIES.setdefault(name, cls)
        if registered_class is not cls:
            raise SnapKVError(
                f"{cls.__qualname__} can't be named {name!r}: {registered_class.__qualname__} has that name"
            )

    def __post_init__(self):
        """Check the budget if it is a number. A share is checked in `quota`."""
        super().__post_init__()
        if isinstance(self.budget, int):
            self._require_usable_budget(self.budget)

    @abstractmethod
    def score(self, entries: Entries) -> mx.array:
        """Return the entries' scores as a lazy array, `(B, n_kv_heads, T)` float32. Higher means keep."""

    @property
    def observes(self) -> bool:
        """Return whether the policy needs queries or their statistics."""
        return self._queries_vote or self.query_statistics is not None

    @property
    def observes_answer(self) -> bool:
        """Return whether the policy also needs the answer's queries, to evict during the answer."""
        return self.schedule == "block" and self._queries_vote

    @property
    def _queries_vote(self) -> bool:
        """Return whether the policy needs queries that vote on entries."""
        return self.obs_window > 0 or self.accumulates_attention

    @property
    def grows(self) -> bool:
        """Return whether all of the answer's entries are kept, on top of the budget."""
        return self.schedule == "once" and self.on_full == "grow"

    @property
    def keeps_shape(self) -> bool:
        """Return whether the cache's shape stays constant while an answer is decoded."""
        return self.schedule == "once" and not self.grows

    def quota(self, n_prompt: int) -> Quota:
        """Return each full-attention layer's quota for a prompt of `n_prompt` tokens.

        Raises: SnapKVError: the budget is a share of the prompt, and this prompt's share is less than one entry or too
            small for a sliding window.
        """
        n_entries = amount(self.budget, n_prompt)
        self._require_usable_budget(n_entries)
        return self._quota_of(n_entries)

    def _quota_of(self, n_entries: int) -> Quota:
        """Return the quota for a budget of `n_entries`. The sink and the window are shrunk if they don't fit."""
        n_window = amount(self.n_window, n_entries)
        return Quota(n_entries, self.n_sink, n_window).shrunk_to_fit()

    def fits(self, n_prompt: int) -> bool:
        """Return whether a prompt of `n_prompt` tokens fits the budget."""
        return n_prompt <= amount(self.budget, n_prompt)

    def _require_usable_budget(self, budget: int) -> None:
        """Check a budget in entries. Raises: SnapKVError: it is 0, or leaves no room for a sliding window."""
        if budget < 1:
            raise SnapKVError(
                f"{self.name} option budget={self.budget} is less than one entry of this prompt"
            )
        if self.keeps_shape:
            has_window = self._quota_of(budget).n_window >= 1
            allowed = "at least 1 entry with schedule=once, where the window slides"
            self._require("n_window", has_window, allowed)
