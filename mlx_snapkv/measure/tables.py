"""A table, and the page of a result."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Table:
    """A title, a remark, column names and rows of text."""

    title: str
    remark: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)

    def add(self, *cells: str) -> None:
        self.rows.append(list(cells))


def as_page(
    title: str, result: dict[str, Any], remark: str, tables: Iterable[Table], pictures=()
) -> str:
    """A result as Markdown: how it was measured, the remark, its tables, and pictures of these names."""
    parts = [f"# {title}", setting_text(result), remark]
    for table in tables:
        parts += [f"## {table.title}", table.remark, as_markdown(table)]
    parts += [f"![{title}](<{picture}>)" for picture in pictures]
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
    rule = [
        "---" if i == 0 or c in ("cache", "server") else "---:" for i, c in enumerate(table.columns)
    ]
    lines = (table.columns, rule, *table.rows)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
