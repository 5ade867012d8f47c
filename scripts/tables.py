"""Build the tables in README and docs from the results in docs/*.json.

A page marks a table's place with `<!-- NAME -->` and `<!-- /NAME -->`. `make docs` writes the table between the marks.
"""

import re
import statistics
from collections.abc import Callable

import associations_page
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
        start_mark, end_mark = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, rest = page.split(start_mark)
        _, after = rest.split(end_mark)
        page = "\n".join([before + start_mark, "", *TABLES[name](), "", end_mark + after])
    return page


# Choosing a setting


def choices() -> list[str]:
    """Return the table of choices, with the pages that measure them."""
    rows = []
    for choice in CHOICES:
        links = []
        for page in choice.pages.split():
            name, *_ = page.partition(".md")
            links.append(f"[{name}]({page})")
        rows.append((choice.when, choice.why, ", ".join(links)))
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
        heading = f"{choice.when[0].upper()}{choice.when[1:]}:"
        lines += [heading, "", "```", _folded(choice.command), "```", ""]
    return lines[:-1]


def _folded(command: str) -> str:
    """Break a command before its options, into lines that fit on a page."""
    first_words, *options = command.replace(" --", "\n--").split("\n")
    lines = [first_words]
    for option in options:
        if len(lines[-1]) + len(option) < 100:
            lines[-1] += f" {option}"
        else:
            lines.append(option)
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
    speed_figures = speed_table(result["speed"])
    lines = [setting_text(result), *result.get("notes", []), "", speed_figures.remark, ""]
    return [*lines, as_markdown(speed_figures)]


def books() -> list[str]:
    """Return the table of books that are read and asked about."""
    result = load("books")
    rows = []
    for row in sorted(result["rows"], key=lambda row: row["context"]):
        shown_figures = {
            "speed": row["context"] / row["read_seconds"],
            "gathered": row["gathered"] or None,  # 0 is shown as an empty cell
            "disk": row["disk_bytes_per_token"] or None,
        }
        rows.append(row | shown_figures)
    longest_full = max(row["context"] for row in rows if row["contender"] == "full cache")
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
    return [*measured(result), BOOKS.format(full=longest_full), "", *figures(rows, columns)]


def batches() -> list[str]:
    """Return the table of batches."""
    result = load("batches")
    full_rows = {row["batch"]: row for row in result["rows"] if row["cache"] == "full cache"}
    rows = []
    for row in result["rows"]:
        full_row = full_rows[row["batch"]]
        ratios = {
            f"{figure}_ratio": row[figure] / full_row[figure]
            for figure in ("tokens_per_second", "run_seconds")
        }
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
    mlx_lm_rows = {
        row["clients"]: row for row in result["rows"] if row["server"] == "mlx_lm.server"
    }
    rows = []
    for row in result["rows"]:
        mlx_lm_row = mlx_lm_rows[row["clients"]]
        together = "never"
        speed = row["together_tokens_per_second"]
        if speed:
            ratio = speed / mlx_lm_row["together_tokens_per_second"]
            together = f"{speed:.1f}, {ratio:.2f}x"
        shown_figures = {
            "first": statistics.median(row["first_seconds"]),
            "last": row["first_seconds"][-1],
            "later": statistics.median(row["follow_up_seconds"]),
            "together": together,
            "cached": row["cached_tokens"] / row["follow_up_tokens"],
        }
        rows.append(row | shown_figures)
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


def bits() -> list[str]:
    """Return the KL and the share of equal tokens by number of bits, with one row per model and kind of text."""
    result = load("bits")
    all_bits = dict.fromkeys(row["bits"] for row in result["rows"])
    rows = []
    for (model, text), text_rows in grouped(result["rows"], "model", "text").items():
        cells = {row["bits"]: f"{row['kl']:.4f}, {row['same']:.2f}" for row in text_rows}
        texts = f"{text} ({text_rows[0]['n']})"
        rows.append((f"`{model}`", texts, *(cells.get(bits, "") for bits in all_bits)))
    headings = (f"{bits} bits: KL, same" for bits in all_bits)
    return [*measured(result), *table(("model", "texts", *headings), rows)]


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


def resident() -> list[str]:
    """Return the facts found by share of the entries, with one row per model and cache."""
    rows = _facts("resident")
    shares = list(dict.fromkeys(row["share"] for row in rows))
    table_rows = [
        (f"`{model}`", name, *(right(row) for row in share_rows))
        for (model, name), share_rows in grouped(rows, "model", "name").items()
    ]
    return table(("model", "cache", *(f"1/{share}" for share in shares)), table_rows)


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
    all_warnings = sorted({warning for row in result["rows"] for warning in row["warnings"]})
    number_of = {warning: number for number, warning in enumerate(all_warnings, start=1)}
    table_rows = []
    for (client, api), client_rows in grouped(result["rows"], "client", "api").items():
        turns = {row["template"]: f"{row['answered']}/{row['turns']}" for row in client_rows}
        cells = [turns.get(template, "") for template in TEMPLATES]
        warning_numbers = sorted(
            {number_of[warning] for row in client_rows for warning in row["warnings"]}
        )
        name = f"{client} {result['clients'][client]}"
        table_rows.append((name, f"`{api}`", *cells, ", ".join(map(str, warning_numbers))))
    header = ("client", "API", *TEMPLATES.values(), "warnings")
    warning_list = [f"{number}. {warning}" for warning, number in number_of.items()]
    return [*measured(result), *table(header, table_rows), "", *warning_list]


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
    "residual": sparse_page.residual,
    "losses": sceptics_page.losses,
    "kept": associations_page.kept,
    "agents": agents,
    "agents-context": agents_context,
}
