"""Split a layer's entries into blocks, which are read one after the other."""

from collections.abc import Iterator

BLOCK_SIZE = 8192  # entries per block, in memory or in files


def spans(start: int, stop: int, block: int = BLOCK_SIZE) -> Iterator[tuple[int, int]]:
    """Yield the start and stop of each block of the entries `[start, stop)`; the last block may be shorter."""
    for first in range(start, stop, block):
        yield first, min(first + block, stop)
