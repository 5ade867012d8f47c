"""How a chat's answers are sampled, and how that is changed on the way."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, get_args

from ..errors import SnapKVError, UnknownOptionError
from ..policies.base import suggestion
from . import flags
from .generation import make_sampler

_FLAGS: dict[str, Any] = {
    "temp": flags.Temp,
    "top_p": flags.TopP,
    "min_p": flags.MinP,
    "top_k": flags.TopK,
    "min_tokens_to_keep": flags.MinTokensToKeep,
    "xtc_probability": flags.XtcProbability,
    "xtc_threshold": flags.XtcThreshold,
    "max_tokens": flags.MaxTokens,
}


@dataclass(frozen=True)
class Sampling:
    """Settings by the names of their flags."""

    temp: float
    top_p: float
    min_p: float
    top_k: int
    min_tokens_to_keep: int
    xtc_probability: float
    xtc_threshold: float
    max_tokens: int

    def options(self, tokenizer) -> dict[str, Any]:
        """The same as options of mlx-lm's `stream_generate`."""
        options = asdict(self)
        max_tokens = options.pop("max_tokens")
        return {"max_tokens": max_tokens, "sampler": make_sampler(tokenizer, **options)}

    def changed(self, name: str, text: str) -> Sampling:
        """These settings with another value of one.

        Raises:
            SnapKVError: there is no such setting, or its flag would not take that value.
        """
        name = name.lstrip("-").replace("-", "_")
        if name not in _FLAGS:
            close = suggestion(name, _FLAGS)
            known = ", ".join(f"/set {setting}" for setting in _FLAGS)
            raise UnknownOptionError(f"unknown setting {name}{close}: one of {known}")
        kind, option = get_args(_FLAGS[name])
        try:
            value = kind(text)
        except ValueError:
            value = None
        low, high = option.min, option.max
        if value is None or not low <= value <= (value if high is None else high):
            bounds = f"from {low}" if high is None else f"from {low} to {high}"
            number = "a whole number" if kind is int else "a number"
            raise SnapKVError(f"/set {name} must be {number} {bounds}, got {text!r}")
        return replace(self, **{name: value})

    def __str__(self) -> str:
        return ", ".join(f"{f.name} {getattr(self, f.name):g}" for f in fields(self))


NAMES = tuple(_FLAGS)
