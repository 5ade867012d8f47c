"""What is said, before a prompt is read, if it is too long for this machine's memory or for the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def tell_if_too_long(
    console: Console, model: Any, n_prompt: int, n_before: int = 0, **options: Any
) -> None:
    """A sentence for each, with what would help; arguments as of `LongPrompts`."""
    from ..planning.long_prompts import LongPrompts

    for said in LongPrompts(model, **options).warnings(n_prompt, n_before):
        console.print(said, soft_wrap=True, markup=False)
