"""Documents of a wanted length with sentences hidden at wanted depths."""

import bisect
import itertools
import random
from collections.abc import Callable, Iterator, Sequence

from ..demo.documents import filler_sentence
from ..errors import SnapKVError
from ..inspecting.sentences import sentences_of

SPARE = 1.25  # pieces counted one by one may take more tokens than when they are joined


def synthetic(rng: random.Random) -> Iterator[str]:
    """Ordinary sentences, without end."""
    while True:
        yield filler_sentence(rng) + " "


def repeated(text: str) -> Iterator[str]:
    """The sentences of a text, from the start again when they run out."""
    return itertools.cycle(list(sentences_of(text.strip() + "\n\n")))


def fill(
    length: int,
    hidden: Sequence[tuple[float, str]],
    filler: Iterator[str],
    count_tokens: Callable[[str], int],
    prompt_of: Callable[[str], list[int]],
) -> list[int]:
    """The longest prompt of at most `length` tokens about a document with `hidden` in it.

    Args:
        hidden: depths, 0 to 1 of the document's tokens, and the text that goes there, between two pieces.
        filler: pieces that end in white space.
        prompt_of: the prompt's token ids for a document.

    Raises:
        SnapKVError: not even one piece of filler has room.
    """
    pieces: list[str] = []
    sizes: list[int] = []
    total = 0
    while total < SPARE * length:
        pieces.append(next(filler))
        sizes.append(max(1, count_tokens(pieces[-1])))
        total += sizes[-1]

    def prompt(n: int) -> list[int]:
        return prompt_of(hide(pieces[:n], sizes[:n], hidden))

    least = len(prompt(1))
    if least > length:
        raise SnapKVError(f"--length must be at least {least} for this question, got {length}")
    numbers = range(1, len(pieces) + 1)
    return prompt(bisect.bisect_right(numbers, length, key=lambda n: len(prompt(n))))


def hide(pieces: Sequence[str], sizes: Sequence[int], hidden: Sequence[tuple[float, str]]) -> str:
    """The pieces with each hidden text at the bound nearest to its depth; `sizes` are the pieces' tokens."""
    bounds = [0, *itertools.accumulate(sizes)]
    at: dict[int, list[str]] = {}
    for depth, text in hidden:
        at.setdefault(_nearest(bounds, depth * bounds[-1]), []).append(text)
    parts = itertools.chain.from_iterable(
        [*at.get(i, []), *pieces[i : i + 1]] for i in range(len(bounds))
    )
    return "".join(parts).strip()


def _nearest(bounds: Sequence[int], place: float) -> int:
    """The index of the bound nearest to `place`, of ascending bounds that enclose it."""
    i = bisect.bisect_left(bounds, place)
    return i - 1 if i and place - bounds[i - 1] < bounds[i] - place else i
