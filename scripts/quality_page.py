"""docs/quality.md, written from docs/quality.json."""

from __future__ import annotations

from typing import Any

from results_page import written_by

PAGE = """# What each policy finds

{written_by}

Facts with values of several tokens are hidden in a document, {needles} in each, and one is asked for at the end, the
one at a depth of 0 to 100%: {depths} depths, {questions} questions at each. A figure is the share of exact answers,
of {asked}. The documents are those of `mlx-snapkv eval needle`, the same for all policies.

- The budget is a share of the prompt's entries, kept per KV head. `once` reads the whole prompt first; `block` evicts
  after every {block} tokens, and goes on while the answer is decoded.
- Under `once` the first two answer tokens are decoded on all entries, with `lookahead=4` the first five. Values have
  3 to 8 tokens, so that row shows SnapKV's default as it is used, not what its selection alone is worth.
- Two stages: KeyDiff reads within four times the entries that SnapKV then keeps (half of the prompt at most).
- All other options are the defaults, but for SnapKV's sink and recent window, which are larger than these budgets.
"""


def page(result: dict[str, Any]) -> str:
    """The page: a table for each model and length."""
    asked = result["depths"] * result["questions"]
    text = PAGE.format(**result, written_by=written_by(result), asked=asked)
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in result["rows"]:
        groups.setdefault((row["model"], row["length"]), []).append(row)
    for (model, length), rows in groups.items():
        text += f"\n## `{model}`, {length:,} tokens\n\n" + "\n".join(_table(rows)) + "\n"
    return text


def _table(rows: list[dict[str, Any]]) -> list[str]:
    full, *others = rows
    shares = sorted({row["share"] for row in others})
    lines = [
        f"Full cache: {_figure(full)}.",
        "",
        "| policy | schedule | "
        + " | ".join(f"1/{share} of the entries" for share in shares)
        + " |",
        "| --- | --- |" + " ---: |" * len(shares),
    ]
    found = {(row["way"], row["schedule"], row["share"]): row for row in others}
    for way, schedule in dict.fromkeys((row["way"], row["schedule"]) for row in others):
        figures = [_figure(found[way, schedule, share]) for share in shares]
        lines.append(f"| {way} | {schedule} | " + " | ".join(figures) + " |")
    return lines


def _figure(row: dict[str, Any]) -> str:
    if row["reason"] is not None:
        return "not compressed"
    return f"{row['right'] / row['asked']:.2f}"
