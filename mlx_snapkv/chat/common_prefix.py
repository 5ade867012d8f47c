"""Where prompts part."""

from collections.abc import Sequence


def common_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """How many tokens all prompts share from the start."""
    shortest = min(prompts, key=len)
    return next(
        (i for i, token in enumerate(shortest) if any(p[i] != token for p in prompts)),
        len(shortest),
    )
