"""Tables of results, the pages and pictures made of them, and which files are such."""

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
    """A title, a remark, column names and rows of text."""

    title: str
    remark: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)

    def add(self, *cells: str) -> None:
        self.rows.append(list(cells))


def as_page(title: str, result: dict[str, Any], remark: str, tables: Iterable[Table]) -> str:
    """Return a result as Markdown: how it was measured, the remark, and its tables."""
    parts = [f"# {title}", setting_text(result), remark]
    for table in tables:
        parts += [f"## {table.title}", table.remark, as_markdown(table)]
    return "\n\n".join(part for part in parts if part) + "\n"


def setting_text(result: dict[str, Any]) -> str:
    """How and where a result was measured: two paragraphs, which its page begins with."""
    machine = result["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    return (
        f"Written by `{result['command']}` at commit {result['commit']}. "
        f"Model: {result['model']}.\n\n"
        f"Machine: {machine['processor']}, {machine['cores']} cores, {machine['system']}, "
        f"{machine['device']}, BLAS: {machine['blas']}. {versions}."
    )


def as_markdown(table: Table) -> str:
    """A table, names to the left and figures to the right."""
    rule = ["---" if i == 0 or c == "cache" else "---:" for i, c in enumerate(table.columns)]
    lines = (table.columns, rule, *table.rows)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def grouped(rows: list[Record], *keys: str) -> dict[tuple, list[Record]]:
    """Rows by their values of some keys, in the order in which these come first."""
    found: dict[tuple, list[Record]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return found


def table_of(
    title: str, remark: str, columns: dict[str, Callable[[Record], str]], rows: Summary
) -> Table:
    return Table(title, remark, [*columns], [[cell(s) for cell in columns.values()] for s in rows])


class Page(NamedTuple):
    """How one kind of records is summed up and shown; the remark says what its figures mean."""

    title: str
    remark: str
    summarise: Callable[[list[Record]], Summary]
    tables: Callable[[Summary], list[Table]]

    def markdown(self, result: Record) -> str:
        """Return a page of all tables."""
        return as_page(self.title, result, self.remark, self.tables(result["summary"]))


# What stands near a file's beginning. Whoever goes on from a .jsonl file looks for itself.
_COMMAND = rb"(mlx-snapkv|python scripts/evaluate\.py) "
_MARKS = {
    ".json": rb'"command": "' + _COMMAND,
    ".md": rb"\nWritten by `" + _COMMAND,
    ".png": rb"Software\0mlx-snapkv",
    ".html": rb'<meta name="generator" content="mlx-snapkv">',
}
_BEGINNING = 1024  # bytes


def is_ours(path: Path) -> bool:
    """Whether a file of a result was written by a command of this package."""
    mark = _MARKS.get(path.suffix, b"")
    with path.open("rb") as file:
        return re.search(mark, file.read(_BEGINNING)) is not None


def put_figure(path: Path, figure: Any, dpi: int = 120) -> None:
    """Write one of matplotlib's figures as a file of this package."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=dpi, metadata={"Software": "mlx-snapkv"})
    put_result(path, picture.getvalue())


def require_matplotlib() -> None:
    """Raises: SnapKVError: matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise SnapKVError(
            "plots need matplotlib: run pip install 'mlx-snapkv[plots]', or drop --output"
        ) from None
