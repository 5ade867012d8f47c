"""Print tables on the terminal."""

from typing import Any

from ..measure.tables import Table

# Text columns are left-aligned, all others right-aligned.
TEXT_COLUMNS = {
    "cache", "method", "task", "model type", "also loads", "note", "why", "name", "here"
}  # fmt: skip
MAX_HEADING = 24  # characters; longer headings are folded
MIN_WIDTH = 108  # characters; narrower terminals wrap lines, but no number is cut off


def print_table(table: Table) -> None:
    """Print a table with its title and remark to stdout."""
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable

    console = Console()
    console.width = max(console.width, MIN_WIDTH)
    style: Any = {"title_justify": "left", "box": box.SIMPLE, "padding": (0, 1, 0, 0)}
    rich_table = RichTable(title=table.title, **style)
    for column in table.columns:
        column_style: Any = {"overflow": "fold"}
        if column not in TEXT_COLUMNS:
            is_folded = len(column) > MAX_HEADING
            column_style |= {
                "justify": "right",
                "no_wrap": not is_folded,
                "min_width": 8 if is_folded else 0,
            }
        rich_table.add_column(column, **column_style)
    for row in table.rows:
        rich_table.add_row(*row)
    console.print(rich_table, table.remark, sep="\n", markup=False)
