"""`mlx-snapkv models`: which model types can be compressed, and why the others can't."""

from __future__ import annotations


def models() -> None:
    """List the model types that can be compressed, and the refused ones with the reason."""
    from rich.console import Console
    from rich.table import Column, Table

    from ..models import listing

    console = Console()
    for title, last, rows in (
        ("Supported", "note", listing.supported()),
        ("Refused", "why", listing.refused()),
    ):
        columns = Column("model type", no_wrap=True), "also loads", last
        heading = f"{title}: {len(rows)} model types of mlx-lm"
        table = Table(*columns, title=heading, title_justify="left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
