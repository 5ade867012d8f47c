"""The options of a policy: fields with a check, and values read from text."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

from .budgets import is_amount, is_whole

MOST = 2**31 - 1  # of any number, since positions are 32 bits


def option(default: Any, allowed: Callable[[Any], bool], said: str) -> Any:
    """A field with a check of its values, which subclasses that give another default keep."""
    return dataclasses.field(default=default, metadata={"allowed": allowed, "said": said})


def count(default: int | None, least: int = 0, most: int | None = None) -> Any:

    def allowed(value: Any) -> bool:
        return is_whole(value) and least <= value and (most is None or value <= most)

    said = f"at least {least}" if most is None else f"{least} to {most}"
    return option(default, allowed, f"a whole number of {said}")


def entry_count(default: int | str, least: int = 0) -> Any:
    said = f'a whole number of entries of at least {least} or a share such as "25%"'
    return option(default, lambda value: is_amount(value, least), said)


def choice(*values: str) -> Any:
    return option(values[0], values.__contains__, f"{', '.join(values[:-1])} or {values[-1]}")


def flag(default: bool) -> Any:
    return option(default, lambda value: isinstance(value, bool), "true or false")


def parsed(text: str) -> Any:
    """A value from the command line: a number, true or false, none, or the word itself."""
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return number(text)
    return text
