"""The one model that is served, as mlx-lm's `ResponseGenerator` asks for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Loaded:
    """A model and its tokenizer; the field `model` of a request never loads another one.

    Attributes:
        name: what clients are told it is called.
        aliases: other names that clients may be told.
    """

    model: Any
    tokenizer: Any
    name: str
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        return [self.name, *self.aliases]
