"""How a request uses its entries: hyper-parameters, each a field with a check of its values.

A policy says which entries stay (`base.py`), sparse attention which ones are read (`sparse.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import SnapKVError, UnknownOptionError, suggestion
from .budgets import Quota, amount, is_amount, is_whole

if TYPE_CHECKING:
    from typing_extensions import Self

MOST = 2**31 - 1  # of any number, since positions are 32 bits
WORDS = {"true": True, "false": False, "none": None}


def option(default: Any, allowed: Callable[[Any], bool], said: str) -> Any:
    """A field with a check of its values, which subclasses that give another default keep."""
    return dataclasses.field(default=default, metadata={"allowed": allowed, "said": said})


def count(default: int | None, least: int = 0, most: int | None = None) -> Any:
    """A field for a whole number of `least` to `most`."""

    def allowed(value: Any) -> bool:
        return is_whole(value) and least <= value and (most is None or value <= most)

    said = f"at least {least}" if most is None else f"{least} to {most}"
    return option(default, allowed, f"a whole number of {said}")


def entry_count(default: int | str, least: int = 0) -> Any:
    """A field for a number of entries of at least `least`, or a share."""
    said = f'a whole number of entries of at least {least} or a share such as "25%"'
    return option(default, lambda value: is_amount(value, least), said)


def choice(*values: str) -> Any:
    """A field for one of these words; the first is the default."""
    return option(values[0], values.__contains__, f"{', '.join(values[:-1])} or {values[-1]}")


def parsed(text: str) -> Any:
    """A value from the command line: true or false, none, a number, or the word itself."""
    for read in (WORDS.__getitem__, int, float):
        with contextlib.suppress(KeyError, ValueError):
            return read(text.lower())
    return text


@dataclass(frozen=True, kw_only=True)
class Method:
    """Base of the policies and of sparse attention: a frozen dataclass of hyper-parameters.

    Attributes:
        budget: entries kept, or read, per KV head: a number, or a share of the prompt ("25%").
        n_sink: number of first entries, which are always among them.
        n_window: number of most recent entries, which are always among them, or a share of the budget ("10%").
    """

    name: ClassVar[str]
    evicts: ClassVar[bool] = True  # entries leave; otherwise all stay, and little of them is read

    # What methods that ask for more than keys and values set.
    obs_window: ClassVar[int] = 0  # how many of the last queries vote
    accumulates_attention: ClassVar[bool] = False  # all queries vote, see `Entries.received`
    query_statistics: ClassVar[int | None] = None  # first tokens that `statistics` leave out
    lookahead: ClassVar[int] = 0  # answer tokens that vote, decoded on all entries
    prefill_chunk: ClassVar[int | None] = None  # under "once"; None follows `prefill_step_size`
    heads_agree: ClassVar[bool] = False  # all heads of a layer keep the same entries
    _implied: ClassVar[str | None] = None  # the option whose value follows from the others'

    budget: int | str = entry_count(8192, least=1)
    n_sink: int = count(0)
    n_window: int | str = entry_count("10%")

    # Options of policies: here, since a dataclass' fields keep the places that base classes give their names.
    min_ctx: ClassVar[int] = 0  # shorter prompts are left to mlx-lm
    schedule: ClassVar[str] = "once"
    block: ClassVar[int] = 1  # tokens between two evictions
    on_full: ClassVar[str] = "slide"  # the answer's entries under "once", when the window is full

    def __post_init__(self):
        self._check_options()
        if isinstance(self.budget, int):
            self._require_entries(self.budget)

    @property
    def observes(self) -> bool:
        """Whether the policy asks for queries, or for what is computed from them."""
        votes = self.obs_window > 0 or self.accumulates_attention
        return votes or self.query_statistics is not None

    @property
    def keeps_shape(self) -> bool:
        return self.schedule == "once" and not self.grows

    @property
    def grows(self) -> bool:
        """Whether all of the answer's entries stay, beside the budget."""
        return self.schedule == "once" and self.on_full == "grow"

    @property
    def observes_answer(self) -> bool:
        return self.schedule == "block" and self.observes

    @property
    def stages(self) -> tuple[Self, Self]:
        """Who chooses while the prompt is read, and who when it has been read."""
        return self, self

    @property
    def reads_in_blocks(self) -> bool:
        """Whether entries are evicted while a prompt is read."""
        return self.schedule == "block"

    @property
    def reads_little(self) -> bool:
        """Whether no chunk of a prompt sees all that came before it."""
        return self.reads_in_blocks

    def window(self, budget: int) -> int:
        return amount(self.n_window, budget)

    def quota(self, n_prompt: int) -> Quota:
        """Return what each full-attention layer keeps of a prompt of `n_prompt` tokens.

        Raises: SnapKVError: the budget's share of it is less than one entry.
        """
        n = amount(self.budget, n_prompt)
        self._require_entries(n)
        return Quota(n, self.n_sink, self.window(n)).shrunk()

    def prefill_quota(self, n_prompt: int) -> Quota:
        """Return what each full-attention layer keeps while the prompt is read: under "once", all entries."""
        quota = self.quota(n_prompt)
        if self.schedule == "block":
            return quota
        return dataclasses.replace(quota, entries=max(quota.entries, n_prompt))

    def fits(self, n_prompt: int) -> bool:
        return n_prompt <= amount(self.budget, n_prompt)

    @classmethod
    def options(cls) -> list[str]:
        """The names of its own options, then those that it shares with the others."""
        own = list(inspect.get_annotations(cls))
        names = [f.name for f in dataclasses.fields(cls)]
        return sorted(names, key=lambda name: own.index(name) if name in own else len(own))

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> Self:
        """Raises: UnknownOptionError: there is no such option; SnapKVError: a value is not allowed."""
        known = cls.options()
        unknown = next((str(name) for name in options if name not in known), None)
        if unknown is not None:
            raise UnknownOptionError(
                f"unknown {cls.name} option {unknown!r}{suggestion(unknown, known)}; known: {', '.join(known)}"
            )
        return cls(**options)

    @classmethod
    def from_string(cls, text: str) -> Self:
        """The method of a string such as `"budget=25%,n_sink=4"`. Raises: SnapKVError: it can't be read."""
        options: dict[str, Any] = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            name, sign, value = (x.strip() for x in part.partition("="))
            if not sign:
                raise SnapKVError(
                    f"{cls.name} options are written key=value, such as budget=25%, got {part!r}"
                )
            if name in options:
                raise SnapKVError(f"{cls.name} option {name} is given twice: give it once")
            options[name] = parsed(value)
        return cls.from_options(options)

    @classmethod
    def from_keyword(cls, value: Self | dict[str, Any] | str | bool | None) -> Self | None:
        """The method that a keyword of its name asks for: `snapkv` and `sparse` of `generate_step`.

        Args:
            value: an object of this class, a dict of its options, a string such as `"top_k=2048"`, or True for the
                defaults. None and False ask for none.

        Raises: SnapKVError: it can't be read.
        """
        if value is None or value is False:
            return None
        if value is True:
            return cls()
        if isinstance(value, dict):
            return cls.from_options(value)
        if isinstance(value, str):
            return cls.from_string(value)
        if isinstance(value, cls):
            return value
        raise SnapKVError(
            f"{cls.name} must be a {cls.__name__} object, a dict or a string, got {type(value).__name__}"
        )

    def __str__(self) -> str:
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        values = {name: getattr(self, name) for name in self.options() if name != self._implied}
        changed = [f"{name}={value}" for name, value in values.items() if value != defaults[name]]
        return f"{self.name}:{','.join(changed)}" if changed else self.name

    def _check_options(self) -> None:
        # Of the class that declared an option: others may have given another default.
        declared = (vars(c).get("__dataclass_fields__", {}) for c in reversed(type(self).__mro__))
        checks = {n: f.metadata for fields in declared for n, f in fields.items() if f.metadata}
        for name, check in checks.items():
            value = getattr(self, name)
            by_default = value is None and getattr(type(self), name) is None
            self._require(name, by_default or check["allowed"](value), check["said"])
            self._require(name, not isinstance(value, int) or value <= MOST, f"at most {MOST}")

    def _require_entries(self, budget: int) -> None:
        if budget < 1:
            raise SnapKVError(
                f"{self.name} option budget={self.budget} is less than one entry of this prompt"
            )
        if self.keeps_shape:
            n_window = Quota(budget, self.n_sink, self.window(budget)).shrunk().n_window
            allowed = "at least 1 entry with schedule=once, where the window slides"
            self._require("n_window", n_window >= 1, allowed)

    def _require(self, name: str, ok: bool, allowed: str) -> None:
        if not ok:
            got = getattr(self, name)
            raise SnapKVError(f"{self.name} option {name} must be {allowed}, got {got!r}")
