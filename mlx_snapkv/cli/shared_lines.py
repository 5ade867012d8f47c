"""What is typed on one of several Macs, for all of them."""

from collections.abc import Iterator

from ..several.ranks import Ranks
from .lines import Lines


class SharedLines:
    """Rank 0's lines, one after the other on every rank; see `Lines`."""

    def __init__(self, lines: Lines, ranks: Ranks):
        self._lines, self._ranks = lines, ranks
        self.interactive = ranks.first(lines.interactive)

    def __iter__(self) -> Iterator[str]:
        lines = iter(self._lines)
        while True:
            line = self._ranks.from_first(lambda: next(lines, None))
            if line is None:
                return
            yield line

    def agree(self, question: str) -> bool:
        """Whether the user at rank 0's terminal says yes."""
        return self._ranks.from_first(lambda: self._lines.agree(question))
