"""`mlx-snapkv models`: which model types can be compressed, and why the others can't."""

from __future__ import annotations

import json

from .options import AsJson


def models(as_json: AsJson = False) -> None:
    """List the model types that can be compressed, and the refused ones with the reason."""
    from rich.console import Console
    from rich.table import Column, Table

    from ..models import listing

    lists = (
        ("Supported", "note", listing.supported()),
        ("Refused", "why", listing.refused()),
    )
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
