"""`mlx-snapkv models` and `mlx-snapkv policies`: what can be compressed, and how."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

from typer import Option

from .choices import CHOICES
from .options import AsJson

if TYPE_CHECKING:
    from ..policies import Policy


def models(as_json: AsJson = False) -> None:
    """List the model types that can be compressed, and the refused ones with the reason."""
    from rich.console import Console
    from rich.table import Column, Table

    from ..models.table import refused, supported

    lists = ("Supported", "note", supported()), ("Refused", "why", refused())
    if as_json:
        found = {}
        for title, last, rows in lists:
            names = ("model_type", "also_loads", last)
            found[title.lower()] = [dict(zip(names, row)) for row in rows]
        print(json.dumps(found))
        return
    console = Console()
    for title, last, rows in lists:
        columns = Column("model type", no_wrap=True), "also loads", last
        heading = f"{title}: {len(rows)} model types of mlx-lm"
        table = Table(*columns, title=heading, title_justify="left")
        for row in rows:
            table.add_row(*row)
        console.print(table)


def policies(
    choose: Annotated[
        bool, Option("--choose", help="Which to take for what, as commands to paste, instead.")
    ] = False,
) -> None:
    """List the eviction policies with their papers, options and defaults.

    Give one to generate, or two after each other:

    \b
      --policy keydiff:budget=8192
      --policy "keydiff:budget=25%,n_window=20%"
      --policy "keydiff:budget=8192 then snapkv:top_k=1024"
    """
    from ..policies import POLICIES

    if choose:
        for choice in CHOICES:
            pages = ", ".join(f"docs/{page.partition('#')[0]}" for page in choice.pages)
            print(f"{choice.when}: {choice.why}\n    {choice.command}\n    measured: {pages}\n")
        print("Figures: docs/choose.md. Put your own for MODEL, TEXT and QUESTION.")
        return
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
