"""Build the tables of facts found and missed if the question shares no word with the fact."""

import itertools

from results_page import Row, load, measured, table

from mlx_snapkv.measure.methods import FULL_CACHE
from mlx_snapkv.measure.tables import grouped

MOST_MISSED = 12  # missed facts shown on a page


def associations() -> list[str]:
    """Return a table of facts found by method and setting, with the share of the full cache's facts."""
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
    # Take one fact from each method in turn, so that no method fills the table.
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
    """Return a method's heading. Sparse attention and the full cache have only one setting."""
    name = row["method"]
    if name == FULL_CACHE:
        return name
    return f"`{name}`" if name.startswith("sparse:") else f"`{name}`, {row['setting']}"


def _found(row: Row) -> str:
    """Return the number of facts found, and the share of the full cache's facts that are among them."""
    if row["method"] == FULL_CACHE or not row["full"]:
        return str(row["found"])
    return f"{row['found']} ({row['kept'] / row['full']:.0%})"
