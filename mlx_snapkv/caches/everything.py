"""What caches have in common that can give back every entry they were ever fed."""

from abc import ABC, abstractmethod
from typing import Any

from ..entries.entries import Entries
from .stores import Source


class Everything(ABC):
    """A layer's cache from which nothing is lost, wherever its entries are."""

    @abstractmethod
    def offload(self) -> None:
        """Put the entries to where they are kept between turns.

        Raises:
            SnapKVError: there is no room for them; they stay in memory then.
        """

    @abstractmethod
    def growing_cache(self) -> Any:
        """A cache of mlx-lm's kind with all entries, to read on with; what it is fed is held here, too."""

    @abstractmethod
    def saved_form(self) -> Any:
        """A cache of mlx-lm's with the same entries, quantised ones as they are; itself if there is no such."""

    @abstractmethod
    def sources(self) -> list[Source]:
        """Where its entries can be read from without the others, in order of position."""

    @abstractmethod
    def fill(self, entries: Entries) -> None:
        """Hold these entries, all there are, in place of none."""
