"""The contract of a policy: hyper-parameters, and one score per row."""

from __future__ import annotations

import dataclasses
import difflib
from abc import ABC, abstractmethod
from numbers import Integral
from typing import Any, ClassVar

import mlx.core as mx

from ..errors import SnapKVError, UnknownOptionError
from ..votes import Rows


class Policy(ABC):
    """Base of the policies, each a frozen dataclass of hyper-parameters and a `score`.

    Attributes:
        name: what users call it.
        n_sink, top_k, n_window: first rows, best-scored rows and most recent rows kept per KV head.
        min_ctx: prompts with fewer tokens are left alone.
        prefill_chunk: tokens a prefill chunk; None follows `prefill_step_size`.
        obs_window, last_token, lookahead: whose queries are observed; see `SnapKV`.
    """

    name: ClassVar[str]
    n_sink: int
    top_k: int
    n_window: int
    min_ctx: int
    prefill_chunk: int | None
    obs_window: int
    last_token: bool
    lookahead: int | None

    @property
    def budget(self) -> int:
        """Rows kept per KV head."""
        return self.n_sink + self.top_k + self.n_window

    @abstractmethod
    def score(self, rows: Rows) -> mx.array:
        """`(B, n_kv_heads, T)` float32, higher means keep."""

    @classmethod
    def options(cls) -> list[str]:
        return [f.name for f in _fields(cls)]

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
                    f"unknown {cls.name} option {name!r}{_suggestion(name, cls.options())}; "
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
                raise SnapKVError(f"{cls.name} options are written key=value, got {part!r}")
            if name.strip() in options:
                raise SnapKVError(f"{cls.name} option {name.strip()} is given twice: give it once")
            options[name.strip()] = _parse(value.strip())
        return cls.from_options(options)

    def __str__(self) -> str:
        changed = [
            f"{f.name}={getattr(self, f.name)}"
            for f in _fields(type(self))
            if getattr(self, f.name) != f.default
        ]
        return f"{self.name}:{','.join(changed)}" if changed else self.name

    def _require(self, name: str, ok: bool, allowed: str) -> None:
        if not ok:
            raise SnapKVError(
                f"{self.name} option {name} must be {allowed}, got {getattr(self, name)!r}"
            )

    def _require_count(self, name: str, least: int = 0, most: int = 2**31 - 1) -> None:
        value = getattr(self, name)
        ok = isinstance(value, Integral) and not isinstance(value, bool)
        ok = ok and least <= int(value) <= most
        allowed = f"at least {least}" if most == 2**31 - 1 else f"{least} to {most}"
        self._require(name, ok, f"a whole number of {allowed}")


def _fields(cls: type[Policy]) -> tuple[dataclasses.Field, ...]:
    return dataclasses.fields(cls)  # type: ignore[arg-type]  # every policy is a dataclass


def _parse(text: str) -> Any:
    """A value from the command line: whole number, true or false, none, or the word itself."""
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return int(text)
    except ValueError:
        return text


def _suggestion(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
