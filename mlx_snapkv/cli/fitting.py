"""What is said, before a prompt is read, if it is too long for this machine's memory or for the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from ..engine.recalling import Recall


def tell_if_too_long(
    console: Console,
    model: Any,
    policy: Any,
    recall: Recall,
    n_prompt: int,
    *,
    n_before: int = 0,
    **options: Any,
) -> None:
    """A sentence for each, with what would help.

    Args:
        n_before: tokens that have been read already.
        options: as of `plan_memory`.
    """
    from ..engine.far import beyond
    from ..planning.fit import Fit

    said = [Fit(model, policy, **options).warning(n_prompt)]
    if options.get("max_kv_size") is None:
        said.append(beyond(model, policy, recall, n_before + n_prompt))
    for sentence in said:
        if sentence is not None:
            console.print(sentence, soft_wrap=True, markup=False)
