"""What is said, before a prompt is read, if it will not fit this machine's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def tell_if_too_long(
    console: Console, model: Any, policy: Any, n_prompt: int, **options: Any
) -> None:
    """One sentence, with what would fit; options as of `plan_memory`."""
    from ..planning.fit import Fit

    said = Fit(model, policy, **options).warning(n_prompt)
    if said is not None:
        console.print(said, soft_wrap=True, markup=False)
