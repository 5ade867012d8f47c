"""Make the tables of facts found, and missed, by questions that share no word with the fact."""

import itertools

from results_page import Row, load, measured, table

from mlx_snapkv.measure.methods import FULL_CACHE
from mlx_snapkv.measure.tables import grouped

MOST_MISSED = 12  # missed facts that a page shows


def associations() -> list[str]:
    """Return the facts found, with a column for each method and setting, and how much of the full cache's is kept."""
    parts = load("associations")["parts"]
    lines = [line for part in parts for line in measured(part)]
    rows = [row | {"model": part["model"]} for part in parts for row in part["rows"]]
    columns = dict.fromkeys([FULL_CACHE, *map(_column, rows)])
    body = []
    for (model, length, variant), own in grouped(rows, "model", "length", "variant").items():
        cells = {_column(row): _found(row) for row in own}
        found = (cells.get(column, "") for column in columns)
        body.append((f"`{model}`", f"{length:,}", f"{variant} ({own[0]['asked']})", *found))
    return [*lines, *table(("model", "tokens", "facts (asked)", *columns), body)]


def missed() -> list[str]:
    """Return facts that the full cache finds and a method misses, with the method's answer."""
    rows = [row for part in load("associations")["parts"] for row in part["missed"]]
    # The first of each method in turn, so that no method fills the table.
    turns = grouped(rows, "method", "setting").values()
    mixed = (row for turn in itertools.zip_longest(*turns) for row in turn if row)
    chosen = itertools.islice(mixed, MOST_MISSED)
    body = [
        (_column(row), f"{row['length']:,}", row["question"], row["fact"], row["answer"])
        for row in chosen
    ]
    if not body:
        return ["So far, none was missed."]
    return table(("method", "tokens", "question", "fact", "answer"), body)


def _column(row: Row) -> str:
    """Return a method's heading; sparse attention and the full cache have one setting only."""
    name = row["method"]
    if name == FULL_CACHE:
        return name
    return f"`{name}`" if name.startswith("sparse:") else f"`{name}`, {row['setting']}"


def _found(row: Row) -> str:
    """Return the number of facts found, and the share of those found by the full cache that are among them."""
    if row["method"] == FULL_CACHE or not row["full"]:
        return str(row["found"])
    return f"{row['found']} ({row['kept'] / row['full']:.0%})"
