"""Build the tables of facts found and missed if the question shares no word with the fact."""

from collections.abc import Iterator
from operator import itemgetter

from evaluation.associations import VARIANTS, Fact, facts, facts_of_text
from readme_results import COMPARED, NAMES
from results_page import Row, load, measured, table

from mlx_snapkv.measure.methods import FULL_CACHE, KNOWN, LATER
from mlx_snapkv.measure.tables import grouped

MOST_MISSED = 2  # missed facts shown for each method and length
KEYS = "length", "variant", "method", "setting"  # what a part's row is about
# Column heading -> method and setting, for the page for sceptics.
SHOWN = {
    "sparse, 1,024 entries": ("sparse:budget=1024", LATER),
    "sparse, 1/16": (COMPARED["sparse"], LATER),
    "sparse, 1/32": ("sparse:budget=3.125%", LATER),
    "SnapKV, question at the end": (COMPARED["SnapKV"], KNOWN),
    "KeyDiff, question at the end": (COMPARED["KeyDiff"], KNOWN),
    "SnapKV, question later": (COMPARED["SnapKV"], LATER),
    "KeyDiff, question later": (COMPARED["KeyDiff"], LATER),
}
# Variant -> what its texts contain.
CONTENTS = {
    "one": "one fact",
    "several": "eight facts",
    "contradicting": "four facts, each corrected later",
    "late": "four facts, named at the end of a long answer",
}


def associations() -> list[str]:
    """Return a table of facts found by method and setting, with the share of the full cache's facts."""
    lines = [line for part in load("associations")["parts"] for line in measured(part)]
    rows = _rows()
    columns = dict.fromkeys([FULL_CACHE, *map(_column, rows)])
    table_rows = []
    text_rows = grouped(rows, "model", "length", "variant")
    for (model, length, variant), method_rows in text_rows.items():
        n_asked = max(row["asked"] for row in method_rows)
        cells = {_column(row): _found_text(row, n_asked) for row in method_rows}
        found_cells = (cells.get(column, "") for column in columns)
        table_rows.append((f"`{model}`", f"{length:,}", f"{variant} ({n_asked})", *found_cells))
    return [*lines, *table(("model", "tokens", "facts (asked)", *columns), table_rows)]


def missed() -> list[str]:
    """Return facts that the full cache finds and a method misses, with the method's answer, after a sentence."""
    rows = [
        fact
        for row in _rows()
        for fact in row["missed"]
        if all(fact[key] == row[key] for key in KEYS)
    ]
    shown_rows = [
        row
        for method_rows in grouped(rows, "length", "method", "setting").values()
        for row in method_rows[:MOST_MISSED]
    ]
    shown_rows.sort(key=lambda row: row["length"])
    about = (
        f"The full cache finds these facts, and a method misses them. Shown are {len(shown_rows)} of {len(rows)}, at "
        f"most {MOST_MISSED} for each method and length. All are in `docs/associations.json`."
    )
    table_rows = [
        (_column(row), f"{row['length']:,}", row["question"], row["fact"], row["answer"])
        for row in shown_rows
    ]
    return [about, "", *table(("method", "tokens", "question", "fact", "answer"), table_rows)]


def kept() -> list[str]:
    """Return a table of the full cache's facts that each method finds, too, after a sentence about the questions."""
    rows = _rows()
    full_rows = [row for row in rows if row["method"] == FULL_CACHE]
    n_asked = sum(row["asked"] for row in full_rows)
    n_facts = len({fact.question for row in full_rows for fact in _facts_asked(row)})
    n_found = sum(row["found"] for row in full_rows)
    row_of = {tuple(row[key] for key in ("model", *KEYS)): row for row in rows}
    sixteenth = [row for row in rows if (row["method"], row["setting"]) == SHOWN["sparse, 1/16"]]
    about = (
        f"We wrote {len(facts())} such facts, and asked {n_asked} questions about {n_facts} of them. The full cache "
        f"answered {n_found} correctly. Sparse attention with 1/16 of the entries also answered "
        f"{sum(row['kept'] for row in sixteenth)} of these {n_found} correctly. The table has this number for every "
        "method. SnapKV and KeyDiff keep 1/8 of the entries."
    )
    table_rows = []
    for full_row in full_rows:
        place = full_row["model"], full_row["length"], full_row["variant"]
        cells = []
        for method_and_setting in SHOWN.values():
            row = row_of.get((*place, *method_and_setting))
            cells.append(_kept_text(row, full_row) if row else "")
        contents = f"{CONTENTS[full_row['variant']]} ({full_row['asked']})"
        text = f"{NAMES[full_row['model']]}, {full_row['length']:,}"
        table_rows.append((text, contents, str(full_row["found"]), *cells))
    header = "model, tokens", "a text contains (asked)", "full cache", *SHOWN
    return [about, "", *table(header, table_rows)]


def _rows() -> list[Row]:
    """Return the rows of all parts, with the facts that the part missed. Questions asked in several parts count once.

    All parts ask about a variant's first texts. So of rows about the same, the one with the most questions is complete.
    """
    part_rows = [
        row | {"model": part["model"], "missed": part["missed"]}
        for part in load("associations")["parts"]
        for row in part["rows"]
    ]
    groups = grouped(part_rows, "model", *KEYS)
    return [max(reversed(rows), key=itemgetter("asked")) for rows in groups.values()]


def _facts_asked(row: Row) -> Iterator[Fact]:
    """Yield the facts of a row's questions."""
    n_texts = row["asked"] // VARIANTS[row["variant"]]
    for document in range(n_texts):
        yield from facts_of_text(row["variant"], document, seed=0)


def _column(row: Row) -> str:
    """Return a method's heading. Sparse attention and the full cache have only one setting."""
    name = row["method"]
    if name == FULL_CACHE:
        return name
    return f"`{name}`" if name.startswith("sparse:") else f"`{name}`, {row['setting']}"


def _found_text(row: Row, n_asked: int) -> str:
    """Return the number of facts found, and the share of the full cache's facts that are among them.

    If the method was asked fewer than `n_asked` questions, say so.
    """
    found = str(row["found"])
    if row["asked"] < n_asked:
        found += f" of {row['asked']}"
    if row["method"] == FULL_CACHE or not row["full"]:
        return found
    return f"{found} ({row['kept'] / row['full']:.0%})"


def _kept_text(row: Row, full_row: Row) -> str:
    """Return how many of the full cache's facts a method found, and of how many if it was asked fewer questions."""
    is_same = all(row[count] == full_row[count] for count in ("asked", "full"))
    return str(row["kept"]) if is_same else f"{row['kept']} of {row['full']}"
