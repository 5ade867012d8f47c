"""The tables and the page of an evaluation of fidelity."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from ..engine.report import format_bytes
from ..reporting.table import Table, as_page
from .answering import FULL, KNOWN, LATER
from .fidelity import SETTINGS, TEXT
from .loop import Record
from .tables import difference, grouped

TITLE = "Fidelity to the full cache"
HEADINGS = {
    TEXT: "The text goes on",
    KNOWN: "The full cache's answer, question known",
    LATER: "The full cache's answer, question later",
}
REMARK = (
    "The same tokens for all. KL: how far the model's predictions with the compressed cache are from those with the "
    "full cache, in nats a token; 0 is not at all. Against the first: how much more that is than the first policy's. "
    "Same token: share of the tokens where the likeliest one is the same. Loss: the full cache's mean negative "
    "log-probability of the text's own tokens, in nats, and how much a policy's is higher. All are means over the "
    "pieces; 95% intervals are paired, and bootstrapped over texts. Entries: kept per KV head, the mean over layers. "
    "KV memory: that of the entries held when the prompt is compressed, without room for more."
)
ABOUT = {
    TEXT: "The prompt is a piece of a text, and the tokens after it are judged; no policy looks ahead.",
    KNOWN: "A question comes after the piece, in the prompt that is compressed. Judged: tokens that the small cache is "
    "asked for; those before, which all entries have chosen, count with a KL of 0.",
    LATER: "The piece is compressed first, and then question and answer come.",
}


def summarise(records: list[Record]) -> list[dict[str, Any]]:
    """One JSON object a setting and method, in that order."""
    found = []
    for setting in SETTINGS:
        own = grouped([r for r in records if r["setting"] == setting], "method")
        first = next((rows for (name,), rows in own.items() if name != FULL), own.get((FULL,), []))
        found += [_summary(rows, own[FULL,], first) for rows in own.values()]
    return found


def _summary(own: list[Record], full: list[Record], first: list[Record]) -> dict[str, Any]:
    """A method's figures; records of the full cache and of the first policy are of the same pieces, in order."""
    texts = [r["document"] for r in own]

    def apart(key: str, others: list[Record]) -> dict[str, Any]:
        return vars(difference([r[key] for r in own], [r[key] for r in others], texts))

    has_loss = own[0]["setting"] == TEXT
    return {
        "method": own[0]["method"],
        "setting": own[0]["setting"],
        "pieces": len(own),
        "texts": len(set(texts)),
        "tokens": sum(r["tokens"] for r in own),
        "judged": sum(r["judged"] for r in own),
        "kl": apart("kl", full),
        "kl_against_first": apart("kl", first),
        "same": fmean(r["same"] for r in own),
        "loss": fmean(r["loss"] for r in own) if has_loss else None,
        "loss_against_full": apart("loss", full) if has_loss else None,
        "entries": max(r["entries"] for r in own),
        "kv_bytes": max(r["kv_bytes"] for r in own),
        "reason": next((r["reason"] for r in own if r["reason"]), None),
    }


def tables(summary: list[dict[str, Any]]) -> list[Table]:
    """One a setting."""
    return [_table(own, setting) for (setting,), own in grouped(summary, "setting").items()]


def _table(summary: list[dict[str, Any]], setting: str) -> Table:
    one = summary[0]
    counts = f"{one['pieces']} pieces of {one['texts']} texts, {one['tokens']:,} tokens."
    more = {TEXT: ["loss"], KNOWN: ["judged"], LATER: []}[setting]
    columns = ["method", "KL", "against the first", "same token", *more, "entries", "KV memory"]
    table = Table(HEADINGS[setting], f"{counts} {ABOUT[setting]}", columns)
    first = next((s for s in summary if s["method"] != FULL), None)
    for s in summary:
        is_full = s["method"] == FULL
        judged = {"judged": f"{s['judged']:,}", "loss": _loss(s) if setting == TEXT else ""}
        table.add(
            s["method"],
            "0" if is_full else _interval(s["kl"], "", s["texts"]),
            "" if is_full or s is first else _interval(s["kl_against_first"], "+", s["texts"]),
            f"{s['same']:.1%}",
            *(judged[name] for name in more),
            f"{s['entries']:,}",
            format_bytes(s["kv_bytes"]),
        )
    return table


def _interval(found: dict[str, Any], sign: str, n_texts: int) -> str:
    """A mean and its interval; there is none of a single text."""
    mean, low, high = (format(found[key], f"{sign}.3f") for key in ("mean", "low", "high"))
    return mean if n_texts < 2 else f"{mean} ({low} to {high})"


def _loss(s: dict[str, Any]) -> str:
    """The full cache's, and by how much a policy's is higher."""
    return f"{s['loss']:.3f}" if s["method"] == FULL else f"{s['loss_against_full']['mean']:+.3f}"


def markdown(result: dict[str, Any]) -> str:
    return as_page(TITLE, result, REMARK, tables(result["summary"]))
