"""A layer's entries in blocks, for what reads them one block after the other."""

from collections.abc import Iterator

BLOCK_SIZE = 8192  # entries read at a time, wherever they are; many clusters of the rest


def spans(start: int, stop: int, block: int = BLOCK_SIZE) -> Iterator[tuple[int, int]]:
    """Of the entries `[start, stop)`, where every block of them starts and stops; the last has what is left."""
    for first in range(start, stop, block):
        yield first, min(first + block, stop)
