"""How a chat's answers are sampled, and how that is changed on the way."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, get_args

from mlx_lm.sample_utils import make_sampler

from ..errors import SnapKVError, UnknownOptionError
from ..policies.base import suggestion
from . import flags

_FLAGS: dict[str, Any] = {
    "temp": flags.Temp,
    "top_p": flags.TopP,
    "xtc_probability": flags.XtcProbability,
    "xtc_threshold": flags.XtcThreshold,
    "max_tokens": flags.MaxTokens,
}


@dataclass(frozen=True)
class Sampling:
    """Settings by the names of their flags."""

    temp: float
    top_p: float
    xtc_probability: float
    xtc_threshold: float
    max_tokens: int

    def options(self, tokenizer) -> dict[str, Any]:
        """The same as options of mlx-lm's `stream_generate`."""
        sampler = make_sampler(
            self.temp,
            self.top_p,
            xtc_probability=self.xtc_probability,
            xtc_threshold=self.xtc_threshold,
            xtc_special_tokens=tokenizer.encode("\n") + list(tokenizer.eos_token_ids),
        )
        return {"max_tokens": self.max_tokens, "sampler": sampler}

    def changed(self, name: str, text: str) -> Sampling:
        """These settings with another value of one.

        Raises:
            SnapKVError: there is no such setting, or its flag would not take that value.
        """
        name = name.lstrip("-").replace("-", "_")
        if name not in _FLAGS:
            close = suggestion(name, _FLAGS)
            raise UnknownOptionError(f"unknown setting {name}{close}: one of {', '.join(_FLAGS)}")
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
