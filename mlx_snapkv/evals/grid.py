"""What is asked: cells of prompt length and depth, and the question of each."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Cell:
    """One question: `length` tokens of the prompt, `depth` (0 to 1) of the answer in it, and a number."""

    length: int
    depth: float
    question: int


@dataclass(frozen=True)
class Question:
    """Token ids of a prompt, and the value that a right answer contains."""

    prompt: list[int]
    expected: str


class Task(Protocol):
    """A way to make prompts; the same setting and cell always give the same one."""

    def setting(self) -> dict[str, Any]:
        """What the prompts depend on besides tokenizer and cell, as a JSON object with the task's name."""

    def ask(self, cell: Cell) -> Question:
        """Raises: SnapKVError: the cell's length has no room for the question."""


def cells(lengths: Sequence[int], n_depths: int, n_questions: int) -> list[Cell]:
    """The whole grid, length by length; depths are spread evenly from 0 to 1, a single one is the middle."""
    depths = [round(i / (n_depths - 1), 4) for i in range(n_depths)] if n_depths > 1 else [0.5]
    grid = itertools.product(dict.fromkeys(lengths), depths, range(n_questions))
    return [Cell(*point) for point in grid]
