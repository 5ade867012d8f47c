"""Build the tables in README and docs from the results in docs/*.json.

A page marks a table's place with `<!-- NAME -->` and `<!-- /NAME -->`. `make docs` writes the table between the marks.
"""

import re
import statistics
from collections.abc import Callable

import policies_page
import readme_results
import sceptics_page
import sparse_page
from results_page import Row, figures, load, measured, right, table

from mlx_snapkv.cli.listings import CHOICES
from mlx_snapkv.measure.speed import speed_table
from mlx_snapkv.measure.tables import as_markdown, grouped, setting_text


def filled(page: str) -> str:
    """Return a page with up-to-date tables."""
    for name in re.findall(r"<!-- ([a-z-]+) -->", page):
        start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, rest = page.split(start)
        after = rest.split(end)[1]
        page = "\n".join([before + start, "", *TABLES[name](), "", end + after])
    return page


# Choosing a setting


def choices() -> list[str]:
    """Return the table of choices, with the pages that measure them."""
    rows = []
    for choice in CHOICES:
        pages = ", ".join(f"[{page.partition('.md')[0]}]({page})" for page in choice.pages.split())
        rows.append((choice.when, choice.why, pages))
    return table(("you have", "how it works", "measured in"), rows)


def settings() -> list[str]:
    """Return README's table: each choice, and its command without model, text and question."""
    rows = []
    for choice in CHOICES:
        command = choice.command
        for words in (" --model MODEL", " --prompt-file TEXT", " --prompt QUESTION"):
            command = command.replace(words, "")
        rows.append((choice.when, f"`{command}`"))
    return table(("you have", "command"), rows)


def commands() -> list[str]:
    """Return each choice's command as a code block."""
    lines: list[str] = []
    for choice in CHOICES:
        head = f"{choice.when[0].upper()}{choice.when[1:]}:"
        lines += [head, "", "```", _folded(choice.command), "```", ""]
    return lines[:-1]


def _folded(command: str) -> str:
    """Break a command before its options, into lines that fit on a page."""
    lines = [""]
    for word in command.replace(" --", "\n--").split("\n"):
        fits = len(lines[-1]) + len(word) < 100 or not lines[-1]
        lines[-1:] = [f"{lines[-1]} {word}".strip()] if fits else [lines[-1], word]
    return " \\\n    ".join(lines)


# Speed and memory

BOOKS = (
    "A prompt of random tokens is read once, sparsely, and every entry goes to a file. "
    '"Process" is the memory that the process itself holds, on Linux without cached files. "Entries" is the memory of '
    "the entries after reading, or of their index and means. The full cache was not read beyond {full:,} tokens, "
    "because its time grows with the square of the length. A question has 32 tokens, and a token of its answer gathers "
    'the given number of entries. "Question" is the time to the first token of the answer, the median of 3.'
)


def speed(name: str) -> list[str]:
    """Return the table of `mlx-snapkv bench`."""
    result = load(name)
    speeds = speed_table(result["speed"])
    lines = [setting_text(result), *result.get("notes", []), "", speeds.remark, ""]
    return [*lines, as_markdown(speeds)]


def books() -> list[str]:
    """Return the table of books that are read and asked about."""
    result = load("books")
    rows = [
        row
        | {"speed": row["context"] / row["read_seconds"], "gathered": row["gathered"] or None}
        | {"disk": row["disk_bytes_per_token"] or None}
        for row in sorted(result["rows"], key=lambda row: row["context"])
    ]
    full = max(row["context"] for row in rows if row["contender"] == "full cache")
    columns = {
        "prompt": "{context:,}",
        "cache": "{contender}",
        "a chunk reads": "{entries:,}",
        "read": "{read_seconds:.1f} s",
        "tokens/s": "{speed:.0f}",
        "peak": "{peak_bytes:bytes}",
        "process": "{process_bytes:bytes}",
        "entries": "{kv_bytes:bytes}",
        "disk/token": "{disk:bytes}",
        "gathered": "{gathered:,}",
        "question": "{question_seconds:seconds}",
    }
    return [*measured(result), BOOKS.format(full=full), "", *figures(rows, columns)]


def batches() -> list[str]:
    """Return the table of batches."""
    result = load("batches")
    full = {row["batch"]: row for row in result["rows"] if row["cache"] == "full cache"}
    rows = []
    for row in result["rows"]:
        base = full[row["batch"]]
        ratios = {f"{x}_ratio": row[f"{x}"] / base[x] for x in ("tokens_per_second", "run_seconds")}
        rows.append(row | ratios | {"last": row["first_seconds"][-1]})
    columns = {
        "prompts": "{batch}",
        "cache": "{cache}",
        "tokens/s": "{tokens_per_second:.1f}, {tokens_per_second_ratio:.2f}x",
        "KV memory": "{kv_bytes:bytes}",
        "whole run": "{run_seconds:.1f} s, {run_seconds_ratio:.2f}x",
        "first tokens": "{first_seconds[0]:.1f} to {last:.1f} s",
        "peak memory": "{peak_bytes:bytes}",
    }
    return [*measured(result), *figures(rows, columns)]


def servers() -> list[str]:
    """Return the table that compares mlx-lm's server with ours."""
    result = load("servers")
    base = {row["clients"]: row for row in result["rows"] if row["server"] == "mlx_lm.server"}
    rows = []
    for row in result["rows"]:
        speed = row["together_tokens_per_second"]
        gain = speed / base[row["clients"]]["together_tokens_per_second"] if speed else 0
        rows.append(
            row
            | {"first": statistics.median(row["first_seconds"]), "last": row["first_seconds"][-1]}
            | {"later": statistics.median(row["follow_up_seconds"])}
            | {"together": f"{speed:.1f}, {gain:.2f}x" if speed else "never"}
            | {"cached": row["cached_tokens"] / row["follow_up_tokens"]}
        )
    columns = {
        "clients": "{clients}",
        "server": "{server}",
        "first token": "{first:.1f} / {last:.1f} s",
        "of follow-ups": "{later:seconds}",
        "tokens/s while all answer": "{together}",
        "cached": "{cached:.1%}",
        "process": "{process_bytes:bytes}",
        "right": "{right}/{questions}",
    }
    return [*measured(result), *figures(rows, columns)]


# Facts found

FACT_COLUMNS = {"model": "`{model}`", "cache": "{name}", "right": "{right}/{asked}"}


def _facts(name: str) -> list[Row]:
    """Return the rows for one table from docs/facts.json."""
    return [row for row in load("facts")["rows"] if row["table"] == name]


def memories() -> list[str]:
    """Return facts found, bytes and seconds, by model and cache."""
    columns = FACT_COLUMNS | {
        "held": "{held_bytes:bytes}",
        "in files": "{file_bytes:bytes}",
        "decoding": "{decoding_bytes:bytes}",
        "peak": "{peak_bytes:bytes}",
        "first turn": "{first_seconds:seconds}",
        "later turns": "{later_seconds:seconds}",
    }
    return [*measured(load("facts")), *figures(_facts("memories"), columns)]


def bits() -> list[str]:
    """Return the facts found with quantised entries."""
    return figures(_facts("bits"), FACT_COLUMNS | {"KV memory": "{decoding_bytes:bytes}"})


def resident() -> list[str]:
    """Return the facts found by share of the entries, with one row per model and cache."""
    rows = _facts("resident")
    shares = list(dict.fromkeys(row["share"] for row in rows))
    body = [
        (f"`{model}`", name, *(right(row) for row in own))
        for (model, name), own in grouped(rows, "model", "name").items()
    ]
    return table(("model", "cache", *(f"1/{share}" for share in shares)), body)


TEMPLATES = {
    "chatml": "ChatML",
    "llama3": "Llama 3",
    "mistral": "Mistral",
    "gemma": "Gemma",
    "thinking": "thinking",
}


def agents() -> list[str]:
    """Return the turns answered by each client, with one column per family of templates."""
    result = load("agents")
    warned = sorted({warning for row in result["rows"] for warning in row["warnings"]})
    rows = []
    for (client, api), own in grouped(result["rows"], "client", "api").items():
        turns = {row["template"]: f"{row['answered']}/{row['turns']}" for row in own}
        warnings = sorted({warned.index(x) + 1 for row in own for x in row["warnings"]})
        cells = [turns.get(template, "") for template in TEMPLATES]
        name = f"{client} {result['clients'][client]}"
        rows.append((name, f"`{api}`", *cells, ", ".join(map(str, warnings))))
    header = ("client", "API", *TEMPLATES.values(), "warnings")
    numbered = [f"{i}. {warning}" for i, warning in enumerate(warned, start=1)]
    return [*measured(result), *table(header, rows), "", *numbered]


def agents_context() -> list[str]:
    """Return figures of agents whose conversations outgrew the context."""
    result = load("agents")
    rows = [row for row in result["rows"] if row["template"] == "chatml" and "longest" in row]
    columns = {
        "agent": "{client}",
        "cached of the second turn's prompt": "{second_turn[1]:,} of {second_turn[0]:,}",
        "longest prompt read": "{longest:,}",
        "refused": "{refused}",
        "last prompt": "{after:,}",
    }
    return figures(rows, columns)


TABLES: dict[str, Callable[[], list[str]]] = {
    "results": readme_results.results,
    "choices": choices,
    "sparse-options": policies_page.sparse_options,
    "settings": settings,
    "commands": commands,
    "speed": lambda: speed("benchmarks"),
    "gpu": lambda: speed("benchmarks-gpu"),
    "books": books,
    "batches": batches,
    "servers": servers,
    "memories": memories,
    "bits": bits,
    "resident": resident,
    "reading": sparse_page.reading,
    "rest": sparse_page.rest,
    "losses": sceptics_page.losses,
    "agents": agents,
    "agents-context": agents_context,
}
