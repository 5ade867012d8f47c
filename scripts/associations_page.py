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
    table_rows = []
    text_rows = grouped(rows, "model", "length", "variant")
    for (model, length, variant), method_rows in text_rows.items():
        cells = {_column(row): _found_text(row) for row in method_rows}
        n_asked = method_rows[0]["asked"]  # the same for all methods
        found_cells = (cells.get(column, "") for column in columns)
        table_rows.append((f"`{model}`", f"{length:,}", f"{variant} ({n_asked})", *found_cells))
    return [*lines, *table(("model", "tokens", "facts (asked)", *columns), table_rows)]


def missed() -> list[str]:
    """Return facts that the full cache finds and a method misses, with the method's answer."""
    rows = [row for part in load("associations")["parts"] for row in part["missed"]]
    # Take one fact from each method in turn, so that no method fills the table.
    rows_by_method = grouped(rows, "method", "setting").values()
    turns = itertools.zip_longest(*rows_by_method)
    rows_in_turn = (row for turn in turns for row in turn if row is not None)
    table_rows = [
        (_column(row), f"{row['length']:,}", row["question"], row["fact"], row["answer"])
        for row in itertools.islice(rows_in_turn, MOST_MISSED)
    ]
    return table(("method", "tokens", "question", "fact", "answer"), table_rows)


def _column(row: Row) -> str:
    """Return a method's heading. Sparse attention and the full cache have only one setting."""
    name = row["method"]
    if name == FULL_CACHE:
        return name
    return f"`{name}`" if name.startswith("sparse:") else f"`{name}`, {row['setting']}"


def _found_text(row: Row) -> str:
    """Return the number of facts found, and the share of the full cache's facts that are among them."""
    if row["method"] == FULL_CACHE or not row["full"]:
        return str(row["found"])
    return f"{row['found']} ({row['kept'] / row['full']:.0%})"
