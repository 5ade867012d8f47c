"""What a book will take, said before it is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from ..engine.book_cost import BookCost
    from ..engine.decision import ProgressCallback


def telling(
    console: Console, cost: Callable[[int], BookCost | None], update: ProgressCallback
) -> ProgressCallback:
    """`update`, for mlx-lm's loop; before the first token it says what reading them all will cost, if it is a book.

    Args:
        cost: of so many tokens.
    """

    def tell(done: int, total: int) -> None:
        if done == 0:
            found = cost(total)
            said = [] if found is None else [str(found), *(f"warning: {x}" for x in found.warnings)]
            for line in said:
                console.print(line, markup=False, emoji=False, soft_wrap=True)
        update(done, total)

    return tell
