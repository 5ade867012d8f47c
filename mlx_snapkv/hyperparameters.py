"""Hyper-parameters: fields of a frozen dataclass, each with a check of its values, written as `key=value,...`.

A policy (`compress/policy.py`) and sparse attention (`sparse/options.py`) are such dataclasses.
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
WORD_VALUES = {"true": True, "false": False, "none": None}  # spellings on the command line


def option(
    default: Any,
    is_allowed: Callable[[Any], bool],
    allowed: str,
    *,
    help: str = "",
    compare: bool = True,
) -> Any:
    """Return a field whose value must satisfy `is_allowed`. Subclasses may override the default; the check stays.

    Args:
        default: the default value.
        is_allowed: returns whether a value is allowed.
        allowed: the allowed values, as the end of an error sentence.
        help: a sentence for `--help`, if the field has a flag of its own.
        compare: whether entries depend on the value. If not, the string form and comparisons leave the field out.
    """
    metadata = {"is_allowed": is_allowed, "allowed": allowed, "help": help}
    return dataclasses.field(default=default, metadata=metadata, compare=compare)


def count(default: int | None, least: int = 0, most: int | None = None) -> Any:
    """Return a field for a whole number from `least` to `most`."""

    def is_allowed(value: Any) -> bool:
        return is_whole(value) and least <= value and (most is None or value <= most)

    bounds = f"at least {least}" if most is None else f"{least} to {most}"
    return option(default, is_allowed, f"a whole number of {bounds}")


def entry_count(default: int | str | None, least: int = 0, example: str = "25%") -> Any:
    """Return a field for a number of entries of at least `least`, or a share such as `example`."""
    allowed = f'a whole number of entries of at least {least} or a share such as "{example}"'
    return option(default, lambda value: is_amount(value, least), allowed)


def choice(*values: str, help: str = "") -> Any:
    """Return a field for one of these words; the first is the default. For `help` see `option`."""
    allowed = f"{', '.join(values[:-1])} or {values[-1]}"
    return option(values[0], values.__contains__, allowed, help=help)


def folder(help: str = "") -> Any:
    """Return a field for a folder to write to, which no entry depends on. For `help` see `option`."""
    return option(None, is_writable_folder, "a writable folder", help=help, compare=False)


def is_whole(value: object) -> bool:
    """Return whether `value` is an integer, but not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_amount(value: Any, least: int = 0) -> bool:
    """Return whether `value` is a whole number of at least `least`, or a share of more than 0 and at most 100%."""
    if isinstance(value, str):
        return 0 < _share(value) <= 1
    return is_whole(value) and value >= least


def is_writable_folder(value: Any) -> bool:
    """Return whether `value` is the path of a folder in which files can be made; "~" is the home folder."""
    if not isinstance(value, (str, os.PathLike)):
        return False
    path = os.path.expanduser(value)
    return os.path.isdir(path) and os.access(path, os.W_OK)


def amount(value: int | str, whole: int) -> int:
    """Return the number of entries for a number, or for a share of `whole`, which is rounded down."""
    if isinstance(value, str):
        return int(_share(value) * whole + 1e-9)  # a product just below an integer is that integer
    return int(value)


def smallest_budget(top_k: int, n_sink: int, n_window: int | str) -> int | None:
    """Return the smallest budget with room for `top_k` entries beside sink and window; None if the window is 100%."""
    n_beside_window = n_sink + top_k
    if not isinstance(n_window, str):
        return n_beside_window + n_window
    share = _share(n_window)
    if share == 1:
        return None
    # The window is rounded down, so the budget is more than (n_beside_window - 1) / (1 - share).
    budget = int((n_beside_window - 1) / (1 - share))
    while budget - amount(n_window, budget) < n_beside_window:
        budget += 1
    return budget


def _share(text: str) -> float:
    """Return 0.25 for "25%", and NaN for a text that is not a share."""
    match = re.fullmatch(r"(\d*\.?\d+)%", text)
    return float(match[1]) / 100 if match else math.nan


def _parsed(text: str) -> Any:
    """Return a typed value: true, false, none, a number, or the text itself."""
    for read in (WORD_VALUES.__getitem__, int, float):
        with contextlib.suppress(KeyError, ValueError):
            return read(text.lower())
    return text


@dataclass(frozen=True, kw_only=True)
class Hyperparameters:
    """Base of dataclasses that are read from a string, a dict or keywords, and checked when they are made."""

    name: ClassVar[str]
    # The field whose value follows from other fields; the string form leaves it out.
    implied_option: ClassVar[str | None] = None

    def __post_init__(self):
        """Check the values of all fields. Raises: SnapKVError: a value is not allowed."""
        self._check_options()

    @classmethod
    def options(cls) -> list[str]:
        """Return the names of all fields; fields that the class itself declares come first."""
        declared = list(inspect.get_annotations(cls))
        names = [field.name for field in dataclasses.fields(cls)]
        inherited = [name for name in names if name not in declared]
        return [name for name in declared if name in names] + inherited

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> Self:
        """Make an object from a dict.

        Raises:
            UnknownOptionError: a key is not a field; the sentence lists the fields.
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
        """Make an object from a string such as `"budget=25%,n_sink=4"`. Raises: SnapKVError."""
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
        """Make an object from a keyword argument, such as `snapkv` and `sparse` of `generate_step`.

        Args:
            value: an object of this class, a dict of its fields, a string such as `"top_k=2048"`, or True for the
                defaults. None and False return None.

        Raises: SnapKVError: the value is of another type, or a field is not allowed.
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
        """Return the command-line string: the name, and the fields that differ from their defaults."""
        defaults = {each.name: each.default for each in dataclasses.fields(self) if each.compare}
        changed = []
        for name in self.options():
            value = getattr(self, name)
            if name != self.implied_option and value != defaults.get(name, value):
                changed.append(f"{name}={value}")
        return f"{self.name}:{','.join(changed)}" if changed else self.name

    def _check_options(self) -> None:
        """Check the values of all fields. Raises: SnapKVError: a value is not allowed."""
        for name, check in self._checks().items():
            value = getattr(self, name)
            is_unset = value is None and getattr(type(self), name) is None  # None is the default
            self._require(name, is_unset or check["is_allowed"](value), check["allowed"])
            is_too_large = isinstance(value, int) and value > MAX_NUMBER
            self._require(name, not is_too_large, f"at most {MAX_NUMBER}")

    @classmethod
    def _checks(cls) -> dict[str, Any]:
        """Return the metadata of `option` by field, from the class that declared the field's check."""
        checks: dict[str, Any] = {}
        for base in reversed(cls.__mro__):
            fields = vars(base).get("__dataclass_fields__", {})
            checks |= {name: field.metadata for name, field in fields.items() if field.metadata}
        return checks

    def _require(self, name: str, is_allowed: bool, allowed: str) -> None:
        """Raise SnapKVError unless a field's value is allowed; `allowed` describes the allowed values."""
        if not is_allowed:
            got = getattr(self, name)
            raise SnapKVError(f"{self.name} option {name} must be {allowed}, got {got!r}")
