"""`mlx-snapkv policies`: the eviction policies, their papers and options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from .choices import CHOICES

if TYPE_CHECKING:
    from ..policies import Policy


Choose = Annotated[
    bool, typer.Option("--choose", help="Which to take for what, as commands to paste, instead.")
]


def policies(choose: Choose = False) -> None:
    """List the eviction policies with their papers, options and defaults.

    Give one to generate, or two after each other:

    \b
      --policy keydiff:budget=8192
      --policy "keydiff:budget=25%,n_window=20%"
      --policy "keydiff:budget=8192 then snapkv:top_k=1024"
    """
    if choose:
        _print_choices()
        return
    from ..policies import POLICIES

    for cls in POLICIES.values():
        paper = f" ({cls.paper})" if cls.paper else ""
        print(f"{cls.name}: {cls.summary}{paper}")
        print(f"    {', '.join(f'{name}={value}' for name, value in defaults(cls).items())}")


def defaults(cls: type[Policy]) -> dict[str, str]:
    """A policy's options and their defaults as they are typed, its own first."""
    policy = cls()
    values = {name: getattr(policy, name) for name in cls.options()}
    return {
        name: str(v).lower() if v is None or isinstance(v, bool) else str(v)
        for name, v in values.items()
    }


def _print_choices() -> None:
    for choice in CHOICES:
        pages = ", ".join(f"docs/{page.partition('#')[0]}" for page in choice.pages)
        print(f"{choice.when}: {choice.why}\n    {choice.command}\n    measured: {pages}\n")
    print("Figures: docs/choose.md. Put your own for MODEL, TEXT and QUESTION.")
