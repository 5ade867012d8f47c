"""docs/quality.md, of what `measure_quality.py` has measured."""

import textwrap
from pathlib import Path
from typing import Any

from results_page import table, written_by

from mlx_snapkv.engine.report import format_bytes
from mlx_snapkv.evals.methods import FULL
from mlx_snapkv.evals.tables import before_compression, interval

HOW = """## How it was measured

- **Fidelity** needs no labelled data. A piece of a text is read once on the full cache, and every policy gets a copy.
  KL is the divergence of the predictions with the compressed cache from those with the full cache, in nats a token;
  *same* is the share of tokens whose likeliest token is the same. *text*: the 64 tokens after the piece, compressed
  without lookahead. *known*: the full cache's own answer to a question at the prompt's end, from the first token that
  is decoded after the compression; *judged* is their share of the answer. Two tokens are decoded before it, or a
  `lookahead` and one more. *later*: the piece is compressed before the question comes.
- **RULER's** tasks are made by lm-evaluation-harness (`scripts/make_ruler.py`) and have its score: the share of the
  references that stand in the output. A task that the full cache can't do shows nothing, whatever its row says.
  With `lookahead=32` an answer's first 33 tokens are decoded on all entries, and RULER's references mostly stand in
  those: such a row shows the full cache's answers, of the embedded tasks, too. By default, 0, only the first two are.
  *Before compression* is the share of the answers' tokens that were decoded before it. With `memory recall` each token
  chooses its entries.
- *Question later*: the document is compressed before the question comes. *Read in blocks*: each policy evicts while it
  reads, before it has read the question at the end. *By the full cache alone*: RULER's other tasks, asked of no policy.
  *More tasks*: those of them that it can do, asked of policies.
- Intervals are 95%, paired by text or question, and bootstrapped over documents.
- SmolLM2-135M-Instruct and Gemma 3 270M (not instruction-tuned, so its answers ramble) are small. A large model may
  differ: measure yours with the same commands.
- The embedded `demo-tasks` was trained to look facts up. It tells bugs, not quality: its KeyDiff finds what no policy
  finds for real models.
"""
WHAT = {
    "more": ", more tasks",
    "later": ", question later",
    "blocks": ", read in blocks",
    "others": ", by the full cache alone",
    "sinks": ", KeyDiff's sinks",
    "entries": ", 512 and 256 entries",
}
# Of figures that were measured before they began after the compression.
OLDER = (
    "In *an answer, question known* the answers' first two tokens, decoded before the compression, count as 0 here: "
    "this was measured before they were left out."
)
SETTINGS = {
    "text": "the text goes on",
    "known": "an answer, question known",
    "later": "an answer, question later",
}


def page(result: dict[str, Any]) -> str:
    """The page, with a section for each part."""
    lines = ["# How far answers move", "", written_by(result), "", HOW]
    for part in result["parts"]:
        show = _fidelity if part["task"] == "fidelity" else _scores
        lines += [f"## {_title(part)}", "", *_command(part["command"]), "", *show(part), ""]
    return "\n".join(lines)


def _title(part: dict[str, Any]) -> str:
    kinds = {"fidelity": "Fidelity", "suite": "Embedded tasks"}
    title = f"{kinds.get(part['task'], 'RULER')}, {str(part['model']).rpartition('/')[2]}"
    title += WHAT.get(part["part"].partition("-")[0], "") + ", recall" * (
        " recall" in part["command"]
    )
    if part["task"] == "fidelity":
        title += f", {_texts(part)}"
        after = "" if part["continuation"] == 64 else f" and {part['continuation']} after them"
        return f"{title}, {part['length']:,} tokens{after}"
    lengths = {s["length"] for s in part["summary"]}
    return title + "".join(f", {n:,} tokens" for n in sorted(lengths - {None}))


def _texts(part: dict[str, Any]) -> str:
    """The folder's name: essays, code."""
    return ", ".join(Path(text).name for text in part["text"])


def _command(command: str) -> list[str]:
    wrapped = textwrap.wrap(command, 110, break_long_words=False, break_on_hyphens=False)
    return ["```", *(f"{line} \\" for line in wrapped[:-1]), wrapped[-1], "```"]


def _fidelity(part: dict[str, Any]) -> list[str]:
    """KL and share of the same tokens by method, a pair of columns a setting."""
    cells = {(s["method"], s["setting"]): s for s in part["summary"]}
    settings = [s for s in SETTINGS if any(setting == s for _, setting in cells)]
    one = part["summary"][0]
    header = ["policy", "entries", "KV memory"]
    columns = [(s, x) for s in settings for x in ("KL", "same", *["judged"] * (s == "known"))]
    header += [f"{SETTINGS[s]}: {x}" for s, x in columns]
    rows = []
    for method in dict.fromkeys(method for method, _ in cells):
        own = {s: cells[method, s] for s in settings if (method, s) in cells}
        first = next(iter(own.values()))
        size = str(first["entries"] or "all"), format_bytes(first["kv_bytes"])
        rows.append([f"`{method}`", *size, *(_figures(own.get(s))[x] for s, x in columns)])
    about = f"{one['pieces']} pieces of {one['texts']} files."
    older = "known" in settings and "judged" not in part
    return [f"{about} {OLDER}" if older else about, "", *table(header, rows)]


def _figures(own: dict[str, Any] | None) -> dict[str, str]:
    """Nothing of a setting in which a policy was not measured."""
    if own is None:
        return dict.fromkeys(("KL", "same", "judged"), "")
    judged = f"{own['judged'] / own['tokens']:.2f}"
    if own["kl"] is None:
        return {"KL": "not judged", "same": "", "judged": judged}
    return {"KL": interval(own["kl"], ".3f"), "same": f"{own['same']:.3f}", "judged": judged}


def _scores(part: dict[str, Any]) -> list[str]:
    """Scores by task, and the mean's paired difference to the full cache's."""
    lines = []
    for setting in dict.fromkeys(s["setting"] for s in part["summary"]):
        own = [s for s in part["summary"] if s["setting"] == setting]
        tasks = list(own[0]["by_task"])
        header = ["policy", "questions", "entries", *tasks, "mean", "against the full cache"]
        before = [before_compression(s) for s in own]
        header += ["before compression"] * any(before)
        rows = [
            [
                f"`{s['method']}`",
                str(s["asked"]),
                str(s["entries"] or "all"),
                *(f"{100 * s['by_task'][task]:.1f}" for task in tasks),
                f"{100 * s['score']:.1f}",
                "" if s["method"] == FULL else interval(s["difference"], "+.1f", 100),
                *[share] * any(before),
            ]
            for s, share in zip(own, before)
        ]
        lines += [f"Question {setting}.", "", *table(header, rows), ""]
    return lines[:-1]
