"""What a model is asked, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass

from ..caches.layers import file_bytes, kv_bytes
from ..engine.report import CompressionReport
from ..several.ranks import ALONE, Ranks


@dataclass(frozen=True)
class Prompt:
    """Tokens to be read and answered.

    Attributes:
        tokens: their ids.
        max_tokens: of the answer.
        first_line: whether the answer ends with its first line that is not empty.
        cache: the prompt cache to go on from; None is a fresh one.
    """

    tokens: list[int]
    max_tokens: int
    first_line: bool = False
    cache: list | None = None

    def is_answered(self, text: str) -> bool:
        """Whether nothing more is wanted after an answer's `text`."""
        return self.first_line and "\n" in text.lstrip("\n")


@dataclass(frozen=True)
class Answer:
    """What came of a prompt.

    Attributes:
        text: as it was decoded.
        cache: the prompt cache when it was done.
        report: what became of the tokens that were read for it.
        first_seconds: until the first token; None if others were answered meanwhile.
        ranks: that hold the model, and parts of the cache.
    """

    text: str
    cache: list
    report: CompressionReport
    first_seconds: float | None = None
    ranks: Ranks = ALONE

    def kv_bytes(self, report: CompressionReport) -> int:
        """Bytes of keys and values: once compressed, as `report` tells; else when the answer was done."""
        return report.kv_bytes_after if report.compressed else self.held_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of keys and values when the answer was done, of all ranks, which all have to ask."""
        return sum(self.ranks.gather(kv_bytes(self.cache)))

    @property
    def file_bytes(self) -> int:
        """The same of what is in files."""
        return sum(self.ranks.gather(file_bytes(self.cache)))
