"""The contract of a policy: hyper-parameters, and one score per entry."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral
from typing import Any, ClassVar

import mlx.core as mx

from ..entries.entries import Entries
from ..errors import SnapKVError, UnknownOptionError
from .budgets import (
    Quota,
    amount,
    is_adaptive,
    is_amount,
    is_budget,
    layer_entries,
    mean_entries,
    require_room,
)

SCHEDULES = ("once", "block")
LEAD = 8  # tokens before those that are read again, which lead in to them

POLICIES: dict[str, type[Policy]] = {}  # by name; to define a subclass with one is to register it


@dataclass(frozen=True, kw_only=True)
class Policy(ABC):
    """Base of the policies, each a frozen dataclass of hyper-parameters and a `score`.

    Attributes:
        budget: entries kept per KV head: a number, a share of the prompt ("25%"), or either as a mean over
            the layers: "pyramid:2048", with more entries in low layers, or "adaptive:2048", with as many in each as it
            has among the best of all layers (schedule="once").
        n_sink: first entries, always kept.
        n_window: most recent entries, always kept: a number, or a share of the budget ("10%").
        min_ctx: prompts with fewer tokens are left alone.
        schedule: "block" evicts while the prompt is read and while the answer is generated, whenever the next
            tokens would make more than `budget + block` entries; "once" reads the whole prompt first, and
            while decoding the recent window slides, unless `on_full` says otherwise.
        block: tokens read at a time, at most, under "block".

    Class attributes, for policies that ask for more than keys and values:
        obs_window: how many of the last queries vote.
        accumulates_attention: all queries vote; the votes are in `Entries.received`.
        query_statistics: count statistics of the pre-RoPE queries of all the prompt's tokens but so many first
            ones, for `Entries.statistics`; None is none.
        repeats: tokens of the prompt that are read again at a time, when all have been read, so that their queries
            vote, for `Entries.repeated`; None is none.
        last_token: the prompt's last token votes.
        lookahead: answer tokens that vote, before the prompt is compressed; None leaves it to the policy.
        prefill_chunk: tokens a prefill chunk under "once"; None follows `prefill_step_size`.
        closes_gaps: entries are to be seen as if none were missing between them, where they may be moved at all.
        on_full: what becomes of the answer's entries under "once", when they fill the recent window.
        schedules: those that the policy can follow.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    paper: ClassVar[str]

    obs_window: ClassVar[int] = 0
    accumulates_attention: ClassVar[bool] = False
    query_statistics: ClassVar[int | None] = None
    repeats: ClassVar[int | None] = None
    last_token: ClassVar[bool] = True
    lookahead: ClassVar[int | None] = 0
    prefill_chunk: ClassVar[int | None] = None
    closes_gaps: ClassVar[bool] = False
    on_full: ClassVar[str] = "slide"
    schedules: ClassVar[tuple[str, ...]] = SCHEDULES

    budget: int | str = 8192
    n_sink: int = 0
    n_window: int | str = "10%"
    min_ctx: int = 0
    schedule: str = "block"
    block: int = 512

    def __init_subclass__(cls, registered: bool = True, **kwargs):
        """Register a policy that has a name of its own; SnapKVError if another policy has it."""
        super().__init_subclass__(**kwargs)
        name = vars(cls).get("name")
        if name is None or not registered:
            return
        if name in POLICIES:
            raise SnapKVError(
                f"{cls.__qualname__} can't be called {name!r}: {POLICIES[name].__qualname__} is"
            )
        POLICIES[name] = cls

    def __post_init__(self):
        self._require(
            "budget",
            is_budget(self.budget),
            'a whole number of entries of at least 1, a share such as "25%", or "pyramid:" or "adaptive:" and either',
        )
        self._require_count("n_sink")
        allowed = 'a whole number of entries or a share such as "10%"'
        self._require("n_window", is_amount(self.n_window), allowed)
        self._require_count("min_ctx")
        self._require("schedule", self.schedule in self.schedules, " or ".join(self.schedules))
        self._require_count("block", least=1)
        if self.adaptive:
            allowed = "a number or a share, evenly or as a pyramid: adaptive needs schedule=once"
            self._require("budget", self.schedule == "once", allowed)
        if isinstance(self.budget, int):
            self._require_room(self.budget)

    @abstractmethod
    def score(self, entries: Entries) -> mx.array:
        """`(B, n_kv_heads, T)` float32, higher means keep: a lazy graph, of what it asks `entries` for."""

    @property
    def adaptive(self) -> bool:
        """Whether the layers share the budget out by the scores of their entries."""
        return is_adaptive(self.budget)

    @property
    def observes(self) -> bool:
        """Whether the policy asks for queries, or for what is made of them."""
        votes = self.obs_window > 0 or self.accumulates_attention or self.repeats is not None
        return votes or self.query_statistics is not None

    @property
    def n_lookahead(self) -> int:
        """Answer tokens that vote, before the prompt is compressed, whatever the way in."""
        return self.lookahead or 0

    def lead_in(self, tokens: mx.array, start: int) -> mx.array:
        """Token ids to read before those of the prompt `(T,)` from `start` on are read again."""
        return tokens[max(0, start - LEAD) : start]

    def reserved(self, n_voted: int) -> int:
        """How many of the entries kept for their scores an answer never takes the place of."""
        return 0

    @property
    def keeps_shape(self) -> bool:
        """Whether the answer is decoded with as many entries from its first token to its last."""
        return self.schedule == "once" and not self.grows

    @property
    def grows(self) -> bool:
        """Whether all of the answer's entries stay, beside the budget."""
        return self.schedule == "once" and self.on_full == "grow"

    @property
    def observes_answer(self) -> bool:
        """Whether the policy asks for the queries of the answer, after the compression."""
        return (self.schedule == "block" and self.observes) or self.on_full == "reselect"

    def answer_block(self, n_window: int) -> int:
        """Tokens of the answer that are taken in between two evictions, where the recent window has so many entries."""
        return self.block

    @property
    def stages(self) -> tuple[Policy, Policy]:
        """Who chooses while the prompt is read, and who when it has been read."""
        return self, self

    @property
    def reads_in_blocks(self) -> bool:
        """Whether entries are evicted while a prompt is read."""
        return self.stages[0].schedule == "block"

    def window(self, budget: int) -> int:
        """Recent entries that are always kept, of a budget of so many."""
        return amount(self.n_window, budget)

    def quotas(self, n_prompt: int, n_layers: int) -> list[Quota]:
        """What each full-attention layer keeps of a prompt.

        Raises:
            SnapKVError: a share of this prompt is less than what is kept in any case.
        """
        mean = mean_entries(self.budget, n_prompt)
        self._require_room(mean)
        least = max(1, self.n_sink + self.window(mean))
        counts = layer_entries(self.budget, n_prompt, n_layers, least)
        return [Quota(n, self.n_sink, self.window(mean)) for n in counts]

    def prefill_quotas(self, n_prompt: int, n_layers: int) -> list[Quota]:
        """What each full-attention layer keeps while the prompt is read: under "once", everything."""
        quotas = self.quotas(n_prompt, n_layers)
        if self.schedule == "block":
            return quotas
        return [dataclasses.replace(q, entries=max(q.entries, n_prompt)) for q in quotas]

    def fits(self, n_prompt: int) -> bool:
        """Whether a prompt's entries all stay."""
        return n_prompt <= mean_entries(self.budget, n_prompt)

    @classmethod
    def options(cls) -> list[str]:
        """The names of its own options, then those that it shares with the others."""
        own = list(inspect.get_annotations(cls))
        names = [f.name for f in dataclasses.fields(cls)]
        return sorted(names, key=lambda name: own.index(name) if name in own else len(own))

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> Policy:
        """Build from keyword options.

        Raises:
            UnknownOptionError: a name is not one of the policy's; the message lists those.
            SnapKVError: a value is out of range.
        """
        for name in map(str, options):
            if name not in cls.options():
                raise UnknownOptionError(
                    f"unknown {cls.name} option {name!r}{suggestion(name, cls.options())}; "
                    f"known: {', '.join(cls.options())}"
                )
        return cls(**options)

    @classmethod
    def from_string(cls, text: str) -> Policy:
        """Build from `"key=value,key=value"`; values are read as the field's type."""
        options: dict[str, Any] = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            name, sign, value = part.partition("=")
            if not sign:
                raise SnapKVError(
                    f"{cls.name} options are written key=value, such as budget=25%, got {part!r}"
                )
            if name.strip() in options:
                raise SnapKVError(f"{cls.name} option {name.strip()} is given twice: give it once")
            options[name.strip()] = _parse(value.strip())
        return cls.from_options(options)

    def __str__(self) -> str:
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        told = (name for name in self.options() if name != self._implied)
        values = {name: getattr(self, name) for name in told}
        changed = [f"{name}={value}" for name, value in values.items() if value != defaults[name]]
        return f"{self.name}:{','.join(changed)}" if changed else self.name

    @property
    def _implied(self) -> str | None:
        """The option whose value follows from the others'."""
        return None

    def _require_room(self, budget: int) -> None:
        window = self.window(budget)
        why = f"n_sink={self.n_sink} and n_window={window} entries are always kept"
        require_room(self.name, budget, max(1, self.n_sink + window), why)
        if self.schedule == "once" and not self.grows:
            allowed = "at least 1 entry with schedule=once, where it slides"
            self._require("n_window", window >= 1, allowed)

    def _require(self, name: str, ok: bool, allowed: str) -> None:
        if not ok:
            got = getattr(self, name)
            raise SnapKVError(f"{self.name} option {name} must be {allowed}, got {got!r}")

    def _require_count(self, name: str, least: int = 0, most: int = 2**31 - 1) -> None:
        value = getattr(self, name)
        ok = isinstance(value, Integral) and not isinstance(value, bool)
        ok = ok and least <= int(value) <= most
        told = most != 2**31 - 1 or (isinstance(value, Integral) and int(value) > most)
        allowed = f"{least} to {most}" if told else f"at least {least}"
        self._require(name, ok, f"a whole number of {allowed}")


def _parse(text: str) -> Any:
    """A value from the command line: a number, true or false, none, or the word itself."""
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return number(text)
    return text


def suggestion(word: str, known: Iterable[str]) -> str:
    """A parenthesis with the close match, if there is one."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
