"""docs/quality.md, written from docs/quality.json.

python scripts/quality_page.py                         # writes docs/quality.md and .png again
"""

from __future__ import annotations

import json
from typing import Any

from quality_plot import write_plot
from quality_ways import controls
from quality_words import HOW, INTRO, LEFT_OUT, SECTIONS
from results_page import ROOT, table, written_by

from mlx_snapkv.engine.report import format_bytes
from mlx_snapkv.evals.answering import FULL
from mlx_snapkv.evals.paired import Difference

Rows = list[dict[str, Any]]


class Figures:
    """Figures of the results as the words ask for them, such as `{known[snapkv, 1/16]}`."""

    def __init__(self, rows: Rows):
        self._rows = {(FULL if r["line"] == FULL else r["way"]): r for r in rows}

    def __getitem__(self, way: str) -> str:
        return f"{self._rows[way]['score']:.2f}" if way in self._rows else "(not asked)"


def page(result: dict[str, Any]) -> str:
    parts: dict[str, Rows] = {}
    for row in result["rows"]:
        parts.setdefault(row["part"], []).append(row)
    figures = {part: Figures(rows) for part, rows in parts.items()}
    asked = min(row["asked"] for row in result["rows"])
    known = {"written_by": written_by(result), "length": result["length"], "asked": asked}
    words = known | figures | {"tasks": ", ".join(f"*{task}*" for task in result["tasks"])}
    words["longer_length"] = parts["longer"][0]["length"]
    words["others"] = f"{_best_control(result['rows']):.2f}"
    words["commits"] = _commits(result)
    text = INTRO.format(**words) + HOW.format(**words)
    for part, (heading, what) in SECTIONS.items():
        text += "\n" + heading.format(**words)
        text += (
            "".join(_by_share(parts[part], what.format(**words))) if what else _table(parts[part])
        )
    return text + "\n" + LEFT_OUT.format(**words)


def _commits(result: dict[str, Any]) -> str:
    """Which parts were asked at which commit."""
    asked: dict[str, dict[str, None]] = {}
    for row in result["rows"]:
        asked.setdefault(row["commit"], {})[f"*{row['part']}*"] = None
    return "; ".join(f"{', '.join(parts)} at commit {commit}" for commit, parts in asked.items())


def _best_control(rows: Rows) -> float:
    """The highest score of the policies that are asked only as controls."""
    names = {line.name for line in controls(1)}
    return max((row["score"] for row in rows if row["line"] in names), default=0.0)


def _by_share(rows: Rows, what: str) -> list[str]:
    """A table for each budget."""
    full, *others = rows
    shares = sorted({row["share"] for row in others})
    return [
        f"\n### 1/{share} of the entries, {what}\n"
        + _table([full, *(row for row in others if row["share"] == share)])
        for share in shares
    ]


def _table(rows: Rows) -> str:
    """A row a way, the best first; scores by task where there are several."""
    shares = {row["share"] for row in rows[1:]}
    rows = [rows[0], *sorted(rows[1:], key=lambda row: -row["score"])]
    tasks = list(rows[0]["by_task"])
    tasks = tasks if len(tasks) > 1 else []
    header = ["way", "n", "right", "against the full cache", f"against {rows[0]['base']}"]
    header += ["entries", "KV memory", *tasks]
    return (
        "\n"
        + "\n".join(table(header, [_cells(row, tasks, len(shares) > 1) for row in rows]))
        + "\n"
    )


def _cells(row: dict[str, Any], tasks: list[str], with_share: bool) -> list[str]:
    full = row["line"] == FULL
    base = row.get("to_base")
    stored = f", {format_bytes(row['file_bytes'])} on disk" if row["file_bytes"] else ""
    return [
        row["way"] if with_share and row["share"] > 1 else row["line"],
        str(row["asked"]),
        f"{row['score']:.2f}",
        "" if full else Difference(**row["difference"]).told(),
        Difference(**base).told() if base else "",
        "all" if row["entries"] is None else f"{row['entries']:,}",
        format_bytes(row["kv_bytes"]) + stored,
        *(f"{row['by_task'][task]:.2f}" for task in tasks),
    ]


def main() -> None:
    docs = ROOT / "docs"
    result = json.loads((docs / "quality.json").read_text(encoding="utf-8"))
    (docs / "quality.md").write_text(page(result), encoding="utf-8")
    write_plot(result, docs / "quality.png")


if __name__ == "__main__":
    main()
