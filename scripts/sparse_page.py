"""Build the tables of how close sparse attention comes to the full cache."""

from results_page import load, measured, table

from mlx_snapkv.measure.tables import grouped


def reading() -> list[str]:
    """Return the KL after sparse prefill, with one column per number of entries that a chunk chooses."""
    result = load("reading")
    top_ks = sorted({row["top_k"] for row in result["rows"]})
    rows = []
    groups = grouped(result["rows"], "model", "length", "kind")
    for (model, length, kind), group_rows in groups.items():
        kl_by_top_k = {row["top_k"]: f"{row['kl']:.4f}" for row in group_rows}
        cells = [kl_by_top_k.get(top_k, "") for top_k in top_ks]
        n_cases = group_rows[0]["n"]
        rows.append((f"`{model}`", f"{length:,}", f"{kind} ({n_cases})", *cells))
    header = ("model", "tokens", "what follows", *(f"{top_k:,} a chunk" for top_k in top_ks))
    return [*measured(result), *table(header, rows)]


def residual() -> list[str]:
    """Return the KL of sparse attention, with one column per way to compute the means of unread entries."""
    results = [load(name) for name in ("residual", "residual-code")]
    rows = [row for result in results for row in result["rows"]]
    ways = list(dict.fromkeys(row["way"] for row in rows))
    table_rows = []
    for (model, text, length), way_rows in grouped(rows, "model", "text", "length").items():
        kl_by_way = {row["way"]: f"{row['kl']:.4f}" for row in way_rows}
        tokens = f"{length:,} of {text} ({way_rows[0]['n']})"
        table_rows.append((f"`{model}`", tokens, *(kl_by_way[way] for way in ways)))
    lines = [line for result in results for line in measured(result)]
    return [*lines, *table(("model", "tokens", *ways), table_rows)]


def long_answers() -> list[str]:
    """Return KL and equal tokens of long answers by position, and where the methods' own answers first differ."""
    result = load("long-answers")
    starts = sorted({span["start"] for row in result["rows"] for span in row["spans"]})
    width = result["rows"][0]["spans"][0]["stop"]
    span_headings = [f"{start} to {start + width - 1}" for start in starts]
    table_rows = []
    for row in result["rows"]:
        cells = {span["start"]: f"{span['kl']:.3f}, {span['same']:.2f}" for span in row["spans"]}
        positions_and_lengths = sorted(zip(row["differs"], row["tokens"]))
        differs = [
            "never" if position == length else str(position)
            for position, length in positions_and_lengths
        ]
        kind_and_texts = f"{row['kind']} ({len(row['tokens'])})"
        names = (f"`{row['model']}`", kind_and_texts, f"`{row['method']}`")
        span_cells = (cells.get(start, "") for start in starts)
        table_rows.append((*names, *span_cells, ", ".join(differs)))
    header = ("model", "answer (texts)", "method", *span_headings, "first differs")
    return [*measured(result), *table(header, table_rows)]
