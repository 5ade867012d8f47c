"""Write results as tables, pages and pictures, and recognise files that this package wrote."""

import io
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import SnapKVError
from ..paths import put_result

Record = dict[str, Any]
Summary = list[Record]


@dataclass
class Table:
    """A table with a title, a remark, column names, and rows of text."""

    title: str
    remark: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)

    def add(self, *cells: str) -> None:
        """Add a row with one cell per column."""
        self.rows.append(list(cells))


def as_page(title: str, result: dict[str, Any], remark: str, tables: Iterable[Table]) -> str:
    """Render a result as Markdown: how it was measured, the remark, and the tables."""
    parts = [f"# {title}", setting_text(result), remark]
    for table in tables:
        parts += [f"## {table.title}", table.remark, as_markdown(table)]
    return "\n\n".join(part for part in parts if part) + "\n"


def setting_text(result: dict[str, Any]) -> str:
    """Describe how and where a result was measured, in two paragraphs."""
    machine = result["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    return (
        f"Written by `{result['command']}` at commit {result['commit']}. "
        f"Model: {result['model']}.\n\n"
        f"Machine: {machine['processor']}, {machine['cores']} cores, {machine['system']}, "
        f"{machine['device']}, BLAS: {machine['blas']}. {versions}."
    )


def as_markdown(table: Table) -> str:
    """Render a table as Markdown, with names left-aligned and numbers right-aligned."""
    alignments = ["---:"] * len(table.columns)
    for i, column in enumerate(table.columns):
        is_name = i == 0 or column == "cache"
        if is_name:
            alignments[i] = "---"
    lines = (table.columns, alignments, *table.rows)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def grouped(rows: list[Record], *keys: str) -> dict[tuple, list[Record]]:
    """Group rows by their values of `keys`, in order of first occurrence."""
    groups: dict[tuple, list[Record]] = {}
    for row in rows:
        key_values = tuple(row[key] for key in keys)
        groups.setdefault(key_values, []).append(row)
    return groups


def table_of(
    title: str, remark: str, columns: dict[str, Callable[[Record], str]], records: Summary
) -> Table:
    """Return a table with one row per record. `columns` maps column names to functions that format a cell."""
    rows = [[format_cell(record) for format_cell in columns.values()] for record in records]
    return Table(title, remark, [*columns], rows)


class Page(NamedTuple):
    """The texts and functions that turn an evaluation's records into a page.

    Attributes:
        remark: explanation of the numbers in the tables.
        summarise: function that summarises all records.
        tables: function that builds tables from the summary.
    """

    title: str
    remark: str
    summarise: Callable[[list[Record]], Summary]
    tables: Callable[[Summary], list[Table]]

    def markdown(self, result: Record) -> str:
        """Render a result as a Markdown page, with tables of its `summary`."""
        return as_page(self.title, result, self.remark, self.tables(result["summary"]))


# For each suffix, a pattern that occurs near the start of every result file with that suffix. There is no pattern for
# .jsonl, because `Results` checks those files.
_COMMAND = rb"(mlx-snapkv|python scripts/evaluate\.py) "
_FILE_MARKS = {
    ".json": rb'"command": "' + _COMMAND,
    ".md": rb"\nWritten by `" + _COMMAND,
    ".png": rb"Software\0mlx-snapkv",
    ".html": rb'<meta name="generator" content="mlx-snapkv">',
}
_N_CHECKED_BYTES = 1024


def is_ours(path: Path) -> bool:
    """Return whether a result file bears this package's mark.

    Files whose suffix has no mark, such as `.jsonl`, always pass.
    """
    mark = _FILE_MARKS.get(path.suffix, b"")
    with path.open("rb") as file:
        return re.search(mark, file.read(_N_CHECKED_BYTES)) is not None


def put_figure(path: Path, figure: Any, dpi: int = 120) -> None:
    """Write a matplotlib figure to a PNG file that `is_ours` recognises."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=dpi, metadata={"Software": "mlx-snapkv"})
    put_result(path, picture.getvalue())


def require_matplotlib() -> None:
    """Check that matplotlib is installed. Raises: SnapKVError: matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise SnapKVError(
            "plots need matplotlib: run pip install 'mlx-snapkv[plots]', or drop --output"
        ) from None
