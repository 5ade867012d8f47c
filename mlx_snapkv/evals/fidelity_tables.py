"""The tables and the page of an evaluation of fidelity."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean

from ..engine.report import format_bytes
from ..reporting.table import Table
from .fidelity import SETTINGS, TEXT
from .methods import FULL, KNOWN, LATER
from .tables import Page, Record, Summary, difference, grouped, interval, table_of

REMARK = (
    "The same tokens for all. KL: how far the model's predictions with the compressed cache are from those with the "
    "full cache, in nats a token; 0 is not at all. Against the first: how much more that is than the first policy's. "
    "Same token: share of the tokens where the likeliest one is the same. Loss: the full cache's mean negative "
    "log-probability of the text's own tokens, in nats, and how much a policy's is higher. All are means over the "
    "pieces; 95% intervals are paired, and bootstrapped over texts. Entries: kept per KV head, the mean over layers. "
    "KV memory: that of the entries held when the prompt is compressed, without room for more."
)
# By setting: what the heading says, and what is judged.
JUDGED = {
    TEXT: (
        "The text goes on",
        "The prompt is a piece of a text, and the tokens after it are judged; no policy looks ahead.",
    ),
    KNOWN: (
        "The full cache's answer, question known",
        "A question comes after the piece, in the prompt that is compressed. Judged: tokens that the small cache is "
        "asked for; those before, which all entries have chosen, count with a KL of 0.",
    ),
    LATER: (
        "The full cache's answer, question later",
        "The piece is compressed first, and then question and answer come.",
    ),
}


def summarise(records: list[Record]) -> Summary:
    """One JSON object a setting and method, in that order."""
    found = []
    for setting in SETTINGS:
        own = grouped([r for r in records if r["setting"] == setting], "method")
        first = next((rows for (name,), rows in own.items() if name != FULL), own.get((FULL,), []))
        found += [_summary(rows, own[FULL,], first) for rows in own.values()]
    return found


def _summary(own: list[Record], full: list[Record], first: list[Record]) -> Record:
    """A method's figures; records of the full cache and of the first policy are of the same pieces, in order."""
    texts = [r["document"] for r in own]

    def apart(key: str, others: list[Record]) -> dict[str, float]:
        return difference([r[key] for r in own], [r[key] for r in others], texts)

    has_loss = own[0]["setting"] == TEXT
    return {
        **{key: own[0][key] for key in ("method", "setting")},
        "pieces": len(own),
        "texts": len(set(texts)),
        **{key: sum(r[key] for r in own) for key in ("tokens", "judged")},
        "kl": apart("kl", full),
        "kl_against_first": apart("kl", first),
        "same": fmean(r["same"] for r in own),
        "loss": fmean(r["loss"] for r in own) if has_loss else None,
        "loss_against_full": apart("loss", full) if has_loss else None,
        **{key: max(r[key] for r in own) for key in ("entries", "kv_bytes")},
        "reason": next((r["reason"] for r in own if r["reason"]), None),
    }


def tables(summary: Summary) -> list[Table]:
    """One a setting."""
    return [_table(own, setting) for (setting,), own in grouped(summary, "setting").items()]


def _table(summary: Summary, setting: str) -> Table:
    heading, about = JUDGED[setting]
    one = summary[0]
    counts = f"{one['pieces']} pieces of {one['texts']} texts, {one['tokens']:,} tokens."
    first = next((s for s in summary if s["method"] != FULL), None)

    def kl(s: Record, key: str = "kl", form: str = ".3f") -> str:
        return interval(s[key], form) if one["texts"] > 1 else format(s[key]["mean"], form)

    def against_first(s: Record) -> str:
        return "" if s["method"] == FULL or s is first else kl(s, "kl_against_first", "+.3f")

    def loss(s: Record) -> str:
        full = s["method"] == FULL
        return f"{s['loss']:.3f}" if full else f"{s['loss_against_full']['mean']:+.3f}"

    columns: dict[str, Callable[[Record], str]] = {
        "method": lambda s: s["method"],
        "KL": lambda s: "0" if s["method"] == FULL else kl(s),
        "against the first": against_first,
        "same token": lambda s: f"{s['same']:.1%}",
        **({"loss": loss} if setting == TEXT else {}),
        **({"judged": lambda s: f"{s['judged']:,}"} if setting == KNOWN else {}),
        "entries": lambda s: f"{s['entries']:,}",
        "KV memory": lambda s: format_bytes(s["kv_bytes"]),
    }
    return table_of(heading, f"{counts} {about}", columns, summary)


PAGE = Page("Fidelity to the full cache", REMARK, summarise, tables)
