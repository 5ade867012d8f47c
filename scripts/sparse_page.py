"""Build the tables of how close sparse attention comes to the full cache."""

from results_page import load, measured, table

from mlx_snapkv.measure.tables import grouped


def reading() -> list[str]:
    """Return the KL after sparse prefill, with one column per number of entries that a chunk chooses."""
    result = load("reading")
    top_ks = sorted({row["top_k"] for row in result["rows"]})
    rows = []
    for (model, length, kind), own in grouped(result["rows"], "model", "length", "kind").items():
        kls = {row["top_k"]: f"{row['kl']:.4f}" for row in own}
        cells = [kls.get(top_k, "") for top_k in top_ks]
        rows.append((f"`{model}`", f"{length:,}", f"{kind} ({own[0]['n']})", *cells))
    header = ("model", "tokens", "what follows", *(f"{top_k:,} a chunk" for top_k in top_ks))
    return [*measured(result), *table(header, rows)]


def rest() -> list[str]:
    """Return the KL by the means of unread entries, with one column per way to compute the means."""
    results = [load(name) for name in ("rest", "rest-code")]
    found = [row for result in results for row in result["rows"]]
    ways = list(dict.fromkeys(row["way"] for row in found))
    rows = []
    for (model, text, length), own in grouped(found, "model", "text", "length").items():
        kls = {row["way"]: f"{row['kl']:.4f}" for row in own}
        tokens = f"{length:,} of {text} ({own[0]['n']})"
        rows.append((f"`{model}`", tokens, *(kls[way] for way in ways)))
    made = [line for result in results for line in measured(result)]
    return [*made, *table(("model", "tokens", *ways), rows)]


def long_answers() -> list[str]:
    """Return KL and equal tokens of long answers by position, and where the methods' own answers first differ."""
    result = load("long-answers")
    starts = sorted({span["start"] for row in result["rows"] for span in row["spans"]})
    width = result["rows"][0]["spans"][0]["stop"]
    heads = [f"{start} to {start + width - 1}" for start in starts]
    body = []
    for row in result["rows"]:
        spans = {s["start"]: f"{s['kl']:.3f}, {s['same']:.2f}" for s in row["spans"]}
        pairs = zip(row["differs"], row["tokens"])
        differs = ", ".join("never" if at == n else str(at) for at, n in sorted(pairs))
        asked = (f"`{row['model']}`", row["kind"], f"`{row['method']}`")
        body.append((*asked, *(spans.get(start, "") for start in starts), differs))
    header = ("model", "answer", "method", *heads, "first differs")
    return [*measured(result), *table(header, body)]
