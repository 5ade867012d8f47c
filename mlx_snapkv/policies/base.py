"""The contract of a policy: what it asks of a layer's entries, and one score for each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from ..entries.entries import Entries
from ..errors import SnapKVError
from .method import Method, count

POLICIES: dict[str, type[Policy]] = {}  # by name; defining a subclass with a name registers it


@dataclass(frozen=True, kw_only=True)
class Policy(Method, ABC):
    """Base of the policies, each a frozen dataclass of hyper-parameters and a `score`.

    Attributes:
        budget: entries kept per KV head: a number, or a share of the prompt ("25%").
        n_sink: number of first entries, which are always kept.
        n_window: number of most recent entries, which are always kept, or a share of the budget ("10%").
        min_ctx: shorter prompts are not compressed.
        schedule: "block" evicts during prefill and decoding, whenever the next tokens would make more than
            `budget + block` entries. "once" reads the whole prompt before it evicts; during decoding the recent
            window slides, unless `on_full` says otherwise.
        block: under "block", the maximum number of tokens read at a time.
    """

    summary: ClassVar[str]
    paper: ClassVar[str]
    schedules: ClassVar[tuple[str, ...]] = ("once", "block")

    min_ctx: int = count(0)  # type: ignore[misc]
    schedule: str = "block"  # type: ignore[misc]
    block: int = count(512, least=1)  # type: ignore[misc]

    def __init_subclass__(cls, registered: bool = True, **kwargs):
        """Register a policy that has a name of its own; SnapKVError if another policy has it."""
        super().__init_subclass__(**kwargs)
        name = vars(cls).get("name")
        if name is not None and registered and POLICIES.setdefault(name, cls) is not cls:
            raise SnapKVError(
                f"{cls.__qualname__} can't be named {name!r}: {POLICIES[name].__qualname__} has that name"
            )

    def __post_init__(self):
        super().__post_init__()
        self._require("schedule", self.schedule in self.schedules, " or ".join(self.schedules))

    @abstractmethod
    def score(self, entries: Entries) -> mx.array:
        """`(B, n_kv_heads, T)` float32, higher means keep: a lazy graph, of what it asks `entries` for."""
