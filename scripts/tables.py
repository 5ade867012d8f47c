"""The tables of README and docs, written from the results in docs/*.json into the places that name them.

A place is `<!-- NAME -->` and `<!-- /NAME -->` in a page; `make docs` writes what is between them.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable
from typing import Any

import policies_page
import readme_results
from results_page import Row, load, right, table, written_by

from mlx_snapkv.bench import tables as bench
from mlx_snapkv.cli.listings import CHOICES
from mlx_snapkv.engine.report import format_bytes
from mlx_snapkv.reporting.table import as_markdown, setting_text


def filled(page: str) -> str:
    """A page with its tables as they are now."""
    for name in re.findall(r"<!-- ([a-z-]+) -->", page):
        start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, rest = page.split(start)
        after = rest.split(end)[1]
        page = "\n".join([before + start, "", *TABLES[name](), "", end + after])
    return page


def ratio(row: Row, base: Row, figure: str) -> str:
    return f"{row[figure] / base[figure]:.2f}x"


# What to take


def choices() -> list[str]:
    rows = []
    for choice in CHOICES:
        pages = ", ".join(f"[{page.partition('.md')[0]}]({page})" for page in choice.pages)
        rows.append((choice.when, choice.why, pages))
    return table(("you have", "what to do", "measured in"), rows)


def commands() -> list[str]:
    """A block of code for each choice."""
    lines: list[str] = []
    for choice in CHOICES:
        head = f"{choice.when[0].upper()}{choice.when[1:]}:"
        lines += [head, "", "```", _folded(choice.command), "```", ""]
    return lines[:-1]


def _folded(command: str) -> str:
    """A command in lines that fit a page, broken before its options."""
    lines = [""]
    for word in command.replace(" --", "\n--").split("\n"):
        fits = len(lines[-1]) + len(word) < 100 or not lines[-1]
        lines[-1:] = [f"{lines[-1]} {word}".strip()] if fits else [lines[-1], word]
    return " \\\n    ".join(lines)


# What it costs

BOOKS = (
    "A prompt of random tokens, read once. A book is read by KeyDiff within so many resident entries, and every entry "
    'goes to a file. "Process" is what the process holds itself, on Linux without the files that the system caches for '
    'it; "entries" those in memory afterwards, room for the next block included. The full cache was not read beyond '
    "{full:,} tokens: its seconds grow with the square."
)


def _measured(result: dict[str, Any]) -> list[str]:
    """How a result was measured, with what differs from today."""
    return [written_by(result), *result.get("notes", []), ""]


def speed(name: str) -> list[str]:
    result = load(name)
    made = bench.speed(result["speed"])
    return [setting_text(result), *result.get("notes", []), "", made.remark, "", as_markdown(made)]


def books() -> list[str]:
    """What reading a book and asking it costs."""
    result = load("books")
    rows = sorted(result["rows"], key=lambda row: row["context"])
    full = max(row["context"] for row in rows if row["contender"] == "full cache")
    reading, asking = [], []
    for row in rows:
        who, disk = (f"{row['context']:,}", row["contender"]), row["disk_bytes_per_token"]
        sizes = [format_bytes(row[f"{what}_bytes"]) for what in ("peak", "process", "kv")]
        speed = f"{row['read_seconds']:.1f} s", f"{row['context'] / row['read_seconds']:.0f}"
        on_disk = format_bytes(disk) if disk else ""
        reading.append((*who, f"{row['entries']:,}", *speed, *sizes, on_disk))
        parts = [row.get(f"{part}_seconds") for part in ("vote", "gather", "read_again")]
        seconds = [f"{x:.2f} s" if x is not None else "" for x in (row["question_seconds"], *parts)]
        asking.append((*who, f"{row['gathered']:,}" if row["gathered"] else "", *seconds))
    head = ("prompt", "cache", "resident", "read", "tokens/s", "peak", "process", "entries")
    asked = ("prompt", "cache", "gathered", "question", "votes", "gathering", "read again")
    return [
        *_measured(result),
        BOOKS.format(full=full),
        "",
        *table((*head, "disk/token"), reading),
        "",
        "A question of 32 tokens until its answer's first token, medians of 3: read over the resident entries, and "
        "again while its tokens choose among all. With votes: voted for, gathered, and read "
        "again over what was gathered.",
        "",
        *table(asked, asking),
    ]


def batches() -> list[str]:
    result = load("batches")
    full = {row["batch"]: row for row in result["rows"] if row["cache"] == "full cache"}
    rows = []
    for row in result["rows"]:
        base, first = full[row["batch"]], row["first_seconds"]
        rows.append(
            (
                str(row["batch"]),
                row["cache"],
                f"{row['tokens_per_second']:.1f}, {ratio(row, base, 'tokens_per_second')}",
                format_bytes(row["kv_bytes"]),
                f"{row['run_seconds']:.1f} s, {ratio(row, base, 'run_seconds')}",
                f"{first[0]:.1f} to {first[-1]:.1f} s",
                format_bytes(row["peak_bytes"]),
            )
        )
    head = ("prompts", "cache", "tokens/s", "KV memory", "whole run", "first tokens", "peak memory")
    return [*_measured(result), *table(head, rows)]


def servers() -> list[str]:
    result = load("servers")
    base = {row["clients"]: row for row in result["rows"] if row["server"] == "mlx_lm.server"}
    rows = []
    for row in result["rows"]:
        together = row["together_tokens_per_second"]
        gain = f"{together / base[row['clients']]['together_tokens_per_second']:.2f}x"
        rows.append(
            (
                str(row["clients"]),
                row["server"],
                f"{statistics.median(row['first_seconds']):.1f} / {row['first_seconds'][-1]:.1f} s",
                f"{statistics.median(row['follow_up_seconds']):.2f} s",
                f"{together:.1f}, {gain}" if together else "never",
                f"{row['cached_tokens'] / row['follow_up_tokens']:.1%}",
                format_bytes(row["process_bytes"]),
                f"{row['right']}/{row['questions']}",
            )
        )
    head = ("clients", "server", "first token", "of follow-ups", "tokens/s while all answer")
    head += ("known", "process", "right")
    return [*_measured(result), *table(head, rows)]


def plan() -> list[str]:
    """Planned and used bytes, by model."""
    result = load("plan")
    models: dict[str, list[Row]] = {}
    for row in result["rows"]:
        models.setdefault(row["model"], []).append(row)
    rows = []
    for name, mine in models.items():
        off = [row["planned"] / row["used"] - 1 for row in mine]
        lengths = [f"{row['tokens']:,}" for row in mine]
        sizes = [row["used"] for row in mine]
        rows.append(
            (
                f"`{name}`",
                str(len(mine)),
                " to ".join(dict.fromkeys((lengths[0], lengths[-1]))),
                format_bytes(mine[0]["weights"]),
                f"{format_bytes(min(sizes))} to {format_bytes(max(sizes))}",
                f"{statistics.fmean(map(abs, off)):.1%}",
                f"{max(off, key=abs):+.1%}",
            )
        )
    every = sorted(abs(row["planned"] / row["used"] - 1) for row in result["rows"])
    near = sum(error < 0.1 for error in every)
    told = (
        f"Of {len(every)} cases the median error is {every[len(every) // 2]:.1%}; {near} are within 10%; "
        f"the largest is {every[-1]:.1%}."
    )
    head = ("model", "cases", "tokens", "weights", "used", "mean error", "worst")
    return [written_by(result), told, "", *table(head, rows)]


# What is remembered


def memories() -> list[str]:
    """Facts found, bytes and seconds, by memory and model."""
    result = load("facts")
    rows = [
        (
            f"`{row['model']}`",
            row["name"],
            right(row),
            *(format_bytes(row[f"{part}_bytes"]) for part in ("held", "file", "decoding", "peak")),
            *(f"{row[f'{part}_seconds']:.2f} s" for part in ("first", "later")),
        )
        for row in result["rows"]
        if row["table"] == "memories"
    ]
    head = ("model", "cache", "right", "held", "in files", "decoding", "peak", "first turn")
    return [*_measured(result), *table((*head, "later turns"), rows)]


def bits() -> list[str]:
    rows = [
        (f"`{row['model']}`", row["name"], right(row), format_bytes(row["decoding_bytes"]))
        for row in load("facts")["rows"]
        if row["table"] == "bits"
    ]
    return table(("model", "cache", "right", "KV memory"), rows)


def resident() -> list[str]:
    """Facts found by the share of the entries in memory, a row for each model and way."""
    rows = [row for row in load("facts")["rows"] if row["table"] == "resident"]
    shares = list(dict.fromkeys(row["share"] for row in rows))
    found = {(row["model"], row["name"], row["share"]): right(row) for row in rows}
    ways = dict.fromkeys((row["model"], row["name"]) for row in rows)
    body = [
        (f"`{model}`", name, *(found[model, name, share] for share in shares))
        for model, name in ways
    ]
    return table(("model", "cache", *(f"1/{share}" for share in shares)), body)


def answers() -> list[str]:
    """How near answers come to the full cache's, by when they choose."""
    result = load("answers")
    rows = result["rows"]
    body = []
    for model, share, way in dict.fromkeys((r["model"], r["share"], r["way"]) for r in rows):
        of = {
            r["kind"]: r for r in rows if (r["model"], r["share"], r["way"]) == (model, share, way)
        }
        figures = [f"{of[k]['kl']:.3f}, {of[k]['same']:.3f}" for k in ("needles", "essays")]
        body.append((f"`{model}`", f"1/{share}", way, *figures))
    n = {row["kind"]: row["n"] for row in rows}
    head = ("model", "entries read", "chosen by", f"needles ({n['needles']}): KL, same token")
    head += (f"essays ({n['essays']}): KL, same token",)
    return [*_measured(result), *table(head, body)]


def agents() -> list[str]:
    result = load("agents")
    rows = [
        (
            f"{row['package']} {result['agents'][row['package']]}",
            f"`{row['api']}`",
            "yes" if row["answered"] and row["tool_ran"] else "no",
            f"{row['second_turn'][1]:,} of {row['second_turn'][0]:,}",
            f"{row['longest']:,}",
            str(row["refused"]),
            f"{row['after']:,}",
            "yes" if row["still_answers"] else "no",
        )
        for row in result["rows"]
    ]
    head = ("agent", "API", "answers, runs tools", "known of the second turn's prompt")
    head += ("longest prompt read", "refused", "last prompt", "still answers")
    return [*_measured(result), *table(head, rows)]


TABLES: dict[str, Callable[[], list[str]]] = {
    "results": readme_results.results,
    "policies": lambda: policies_page.summary_table("docs/policies.md"),
    "choices": choices,
    "commands": commands,
    "speed": lambda: speed("benchmarks"),
    "gpu": lambda: speed("benchmarks-gpu"),
    "books": books,
    "batches": batches,
    "servers": servers,
    "plan": plan,
    "memories": memories,
    "bits": bits,
    "resident": resident,
    "answers": answers,
    "agents": agents,
}
