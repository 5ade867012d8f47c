"""Base class for frozen hyper-parameter dataclasses. Values are validated, and can be written as `key=value,...`.

`Policy` (`compress/policy.py`) and `Sparse` (`sparse/options.py`) are derived from it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any, ClassVar

from .errors import SnapKVError, UnknownOptionError, suggestion

if TYPE_CHECKING:
    from typing_extensions import Self

MAX_NUMBER = 2**31 - 1  # positions are 32-bit integers
WORD_VALUES = {"true": True, "false": False, "none": None}  # command-line spellings


def option(
    default: Any,
    is_allowed: Callable[[Any], bool],
    allowed: str,
    *,
    help: str = "",
    compare: bool = True,
) -> Any:
    """Return a dataclass field that is validated by `is_allowed`.

    If a subclass overrides the default value, the validation still applies.

    Args:
        default: the default value.
        is_allowed: function that returns whether a value is allowed.
        allowed: the allowed values, phrased to follow "must be" in an error message.
        help: text for `--help`, if the field has its own command-line flag.
        compare: whether cached entries depend on the value. If not, the field is left out of comparisons and of the
            string form.
    """
    metadata = {"is_allowed": is_allowed, "allowed": allowed, "help": help}
    return dataclasses.field(default=default, metadata=metadata, compare=compare)


def count(default: int | None, least: int = 0, most: int | None = None) -> Any:
    """Return a field for an integer of at least `least` and, if `most` is set, at most `most`."""

    def is_allowed(value: Any) -> bool:
        return is_whole(value) and least <= value and (most is None or value <= most)

    bounds = f"at least {least}" if most is None else f"{least} to {most}"
    return option(default, is_allowed, f"a whole number of {bounds}")


def entry_count(default: int | str | None, least: int = 0, example: str = "25%") -> Any:
    """Return a field for a number of entries, either an integer of at least `least` or a share such as `example`."""

    def is_allowed(value: Any) -> bool:
        if isinstance(value, str):
            return 0 < _share(value) <= 1
        return is_whole(value) and value >= least

    allowed = f'a whole number of entries of at least {least} or a share such as "{example}"'
    return option(default, is_allowed, allowed)


def choice(*values: str, help: str = "") -> Any:
    """Return a field that must be one of `values`. The first value is the default. See `option` for `help`."""
    allowed = f"{', '.join(values[:-1])} or {values[-1]}"
    return option(values[0], values.__contains__, allowed, help=help)


def folder(help: str = "") -> Any:
    """Return a field for a writable folder. The field is left out of comparisons. See `option` for `help`."""
    return option(None, is_writable_folder, "a writable folder", help=help, compare=False)


def is_whole(value: object) -> bool:
    """Return whether `value` is an integer and not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_writable_folder(value: Any) -> bool:
    """Return whether `value` is the path to a writable folder. "~" is expanded to the home folder."""
    if not isinstance(value, (str, os.PathLike)):
        return False
    path = os.path.expanduser(value)
    return os.path.isdir(path) and os.access(path, os.W_OK)


def amount(value: int | str, whole: int) -> int:
    """Convert `value`, a number or a share of `whole`, to a number of entries. Shares are rounded down."""
    if isinstance(value, str):
        return int(_share(value) * whole + 1e-9)  # tolerate floating-point errors
    return int(value)


def smallest_budget(top_k: int, n_sink: int, n_window: int | str) -> int | None:
    """Return the smallest budget with room for the sink, the window and `top_k` entries.

    Return None if the window is 100% of the budget.
    """
    n_beside_window = n_sink + top_k
    if not isinstance(n_window, str):
        return n_beside_window + n_window
    share = _share(n_window)
    if share == 1:
        return None
    # Start at a lower bound. A budget with enough room is at least n_beside_window plus the window. Shares are rounded
    # down, so the window has more than share * budget - 1 entries. Solved for the budget, this gives
    # budget > (n_beside_window - 1) / (1 - share).
    budget = int((n_beside_window - 1) / (1 - share))
    while budget - amount(n_window, budget) < n_beside_window:
        budget += 1
    return budget


def _share(text: str) -> float:
    """Return 0.25 for "25%", or NaN if the text is not a share."""
    match = re.fullmatch(r"(\d*\.?\d+)%", text)
    return float(match[1]) / 100 if match else math.nan


def _parsed(text: str) -> Any:
    """Convert text to a bool, None or a number if possible, otherwise return the text."""
    for read in (WORD_VALUES.__getitem__, int, float):
        with contextlib.suppress(KeyError, ValueError):
            return read(text.lower())
    return text


@dataclass(frozen=True, kw_only=True)
class Hyperparameters:
    """Base class for validated dataclasses that can be created from a string, a dict or a keyword argument's value."""

    name: ClassVar[str]
    # Name of the field whose value follows from other fields, or None. `__str__` omits this field.
    implied_option: ClassVar[str | None] = None

    def __post_init__(self):
        """Validate all fields. Raises: SnapKVError: a value is not allowed."""
        for name, check in self._checks().items():
            value = getattr(self, name)
            is_unset = value is None and getattr(type(self), name) is None  # None is the default
            self._require(name, is_unset or check["is_allowed"](value), check["allowed"])
            is_too_large = isinstance(value, int) and value > MAX_NUMBER
            self._require(name, not is_too_large, f"at most {MAX_NUMBER}")

    @classmethod
    def options(cls) -> list[str]:
        """Return the names of all fields. Those declared in `cls` itself come first."""
        declared = list(inspect.get_annotations(cls))
        names = [field.name for field in dataclasses.fields(cls)]
        inherited = [name for name in names if name not in declared]
        return [name for name in declared if name in names] + inherited

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> Self:
        """Create an instance from a dict.

        Raises:
            UnknownOptionError: a key is not a field. The message lists the fields.
            SnapKVError: a value is not allowed.
        """
        known = cls.options()
        unknown = next((str(name) for name in options if name not in known), None)
        if unknown is not None:
            raise UnknownOptionError(
                f"unknown {cls.name} option {unknown!r}{suggestion(unknown, known)}; known: {', '.join(known)}"
            )
        return cls(**options)

    @classmethod
    def from_string(cls, text: str) -> Self:
        """Create an instance from a string such as `"budget=25%,n_sink=4"`. Raises: SnapKVError."""
        options: dict[str, Any] = {}
        for part in map(str.strip, text.split(",")):
            if not part:
                continue
            name, sign, value = (word.strip() for word in part.partition("="))
            if not sign:
                raise SnapKVError(
                    f"{cls.name} options are written key=value, such as budget=25%, got {part!r}"
                )
            if name in options:
                raise SnapKVError(f"{cls.name} option {name} is given twice: give it once")
            options[name] = _parsed(value)
        return cls.from_options(options)

    @classmethod
    def from_keyword(cls, value: Self | dict[str, Any] | str | bool | None) -> Self | None:
        """Create an instance from a keyword argument, such as `generate_step`'s `snapkv` or `sparse`.

        Args:
            value: an instance, a dict of its fields, a string such as `"top_k=2048"`, or True for the defaults. For
                None and False, the result is None.

        Raises: SnapKVError: the value has the wrong type, or contains an invalid option.
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
        """Return the name and the non-default fields, as written on the command line."""
        defaults = {each.name: each.default for each in dataclasses.fields(self) if each.compare}
        changed = []
        for name in self.options():
            value = getattr(self, name)
            if name != self.implied_option and value != defaults.get(name, value):
                changed.append(f"{name}={value}")
        return f"{self.name}:{','.join(changed)}" if changed else self.name

    @classmethod
    def _checks(cls) -> dict[str, Any]:
        """Return each field's `option` metadata, even if a subclass has overridden the default."""
        checks: dict[str, Any] = {}
        for base in reversed(cls.__mro__):
            fields = vars(base).get("__dataclass_fields__", {})
            checks |= {name: field.metadata for name, field in fields.items() if field.metadata}
        return checks

    def _require(self, name: str, is_allowed: bool, allowed: str) -> None:
        """Raise a SnapKVError that describes the `allowed` values, unless `is_allowed` is true."""
        if not is_allowed:
            got = getattr(self, name)
            raise SnapKVError(f"{self.name} option {name} must be {allowed}, got {got!r}")
