"""Split a layer's entries into blocks that are read one at a time."""

from collections.abc import Iterator

BLOCK_SIZE = 8192  # entries per block


def spans(start: int, stop: int, block: int = BLOCK_SIZE) -> Iterator[tuple[int, int]]:
    """Yield the start and stop of each block in `[start, stop)`. The last block may be shorter."""
    for first in range(start, stop, block):
        yield first, min(first + block, stop)
