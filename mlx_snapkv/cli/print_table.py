"""A result's table on the terminal."""

from rich import box
from rich import table as rich_table
from rich.console import Console

from ..reporting.table import Table

NAMES = ("cache", "server", "policy", "method", "task")  # columns of names; all others hold figures
LONG = 24  # characters of a heading, which are then folded
LEAST_WIDTH = 108  # characters; narrower terminals wrap lines, but no figure is cut


def print_table(made: Table) -> None:
    """Print a table with its title and its remark, names to the left and figures to the right."""
    console = Console()
    console.width = max(console.width, LEAST_WIDTH)
    drawn = rich_table.Table(
        title=made.title, title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0)
    )
    for column in made.columns:
        if column in NAMES:
            drawn.add_column(column, overflow="fold")
        else:
            fold = len(column) > LONG
            drawn.add_column(
                column, justify="right", no_wrap=not fold, overflow="fold", min_width=8 * fold
            )
    for row in made.rows:
        drawn.add_row(*row)
    console.print(drawn, made.remark, sep="\n", markup=False)
