"""What the forms that give an answer in blocks have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

from ..batch.answer import Piece
from .blocks import Block, Blocks, Change
from .channel import Event, Finished, Idle, Read
from .exchange import Exchange
from .respond import Form


class BlockForm(Form):
    """One answer, in blocks; they are streamed as they change."""

    def __init__(self) -> None:
        self.blocks = Blocks()

    def take(self, index: int, event: Event) -> None:
        for _ in self._changes(event):
            pass

    def streamed(self, index: int, event: Event, exchange: Exchange) -> Iterator[str]:
        if isinstance(event, (Idle, Read)):
            yield self.alive
        for change, block, text in self._changes(event):
            yield from self.changed(change, block, text)

    def _changes(self, event: Event) -> Iterator[tuple[Change, Block, str]]:
        if isinstance(event, Piece):
            yield from self.blocks.take(event)
        elif isinstance(event, Finished):
            yield from self.blocks.end()

    alive: str
    """A server-sent event that says nothing but that the connection lives."""

    @abstractmethod
    def changed(self, change: Change, block: Block, text: str) -> Iterator[str]:
        """Server-sent events of what has changed."""
