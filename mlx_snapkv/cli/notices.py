"""What is said before a long prompt is read: that it may not fit, and what it will cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from ..engine.book_cost import BookCost
    from ..engine.decision import ProgressCallback


def tell_if_too_long(
    console: Console, model: Any, n_prompt: int, n_before: int = 0, **options: Any
) -> None:
    """Say if a prompt exceeds this machine's memory or the model's length; arguments as of `LongPrompts`."""
    from ..planning.long_prompts import LongPrompts

    for said in LongPrompts(model, **options).warnings(n_prompt, n_before):
        console.print(said, soft_wrap=True, markup=False)


def telling_cost(
    console: Console, cost: Callable[[int], BookCost | None], update: ProgressCallback
) -> ProgressCallback:
    """`update`, for mlx-lm's loop; before the first token it says what reading a book will cost.

    Args:
        cost: of so many tokens; None if they are no book.
    """

    def tell(done: int, total: int) -> None:
        if done == 0:
            found = cost(total)
            said = [] if found is None else [str(found), *(f"warning: {x}" for x in found.warnings)]
            for line in said:
                console.print(line, markup=False, emoji=False, soft_wrap=True)
        update(done, total)

    return tell
