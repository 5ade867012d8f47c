"""Shared code for measurements: options, results in docs/*.json, Markdown tables, and memory."""

import argparse
import contextlib
import json
import re
import shlex
import string
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mlx_snapkv.cli.results import write_json
from mlx_snapkv.measure.environment import versions_and_machine
from mlx_snapkv.planning.units import format_bytes

ROOT = Path(__file__).resolve().parent.parent

Row = dict[str, Any]


def options(description: str | None) -> argparse.ArgumentParser:
    """Return an argument parser that prints the description without rewrapping it."""
    raw = argparse.RawTextHelpFormatter
    return argparse.ArgumentParser(description=description, formatter_class=raw)


def result_options(description: str | None, page: str) -> argparse.ArgumentParser:
    """Return a parser with the option --out, which is docs/PAGE by default."""
    parser = options(description)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / page, help="without its suffix")
    return parser


def about(script: str, *arguments: str) -> dict[str, Any]:
    """Return a measurement's command, date, commit and machine."""
    setup = versions_and_machine()
    machine = setup["machine"]
    return {
        "command": shlex.join(["python", f"scripts/{script}", *arguments]),
        "date": time.strftime("%Y-%m-%d"),
        "commit": setup["commit"],
        "machine": f"{machine['system']}, {machine['device']}",
        "versions": {name: setup["versions"][name] for name in ("mlx", "mlx-lm")},
    }


def shown_arguments() -> list[str]:
    """Return this run's arguments without --out, because results should not show a local path."""
    arguments = sys.argv[1:]
    if "--out" in arguments:
        index = arguments.index("--out")
        del arguments[index : index + 2]  # the flag and its value
    return arguments


class Result:
    """The rows of a measurement. Every new row is printed and written to OUT.json; `make docs` writes the tables.

    Args:
        out: path without suffix.
        **shared_fields: fields that all rows share.
    """

    def __init__(self, out: Path, **shared_fields: Any):
        """Record the script and its arguments except --out. Nothing is written before the first row."""
        self._out = out
        self._rows: list[Row] = []
        provenance = about(Path(sys.argv[0]).name, *shown_arguments())
        self._result = provenance | shared_fields | {"rows": self._rows}

    def add(self, row: Row) -> None:
        """Add a row, print it, and write the file."""
        print(row, flush=True)
        self._rows.append(row)
        self._out.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._out, self._result)


def written_by(result: dict[str, Any]) -> str:
    """Return the opening sentence of a page or table. Parts of a result may have different commits."""
    parts = result.get("parts", [result])
    commits = list(dict.fromkeys(part["commit"] for part in parts))
    noun = "commit" if len(commits) == 1 else "commits"
    details = [f"{noun} {', '.join(commits)}", result["machine"]]
    details += [f"{name} {number}" for name, number in result.get("versions", {}).items()]
    command_and_date = f"`{result['command']}` on {result['date']}"
    return f"Measured by {command_and_date} ({', '.join(details)})."


def measured(result: dict[str, Any]) -> list[str]:
    """Return the lines above a table: how it was measured."""
    return [written_by(result), ""]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    rule = ["---"] * len(header)
    lines = []
    for cells in [header, rule, *rows]:
        escaped_cells = (cell.replace("|", "\\|") for cell in cells)
        lines.append("| " + " | ".join(escaped_cells) + " |")
    return lines


class _Cells(string.Formatter):
    """`str.format` with the extra formats `bytes` and `seconds`. Values that are None or missing become empty."""

    def get_value(self, key, args, kwargs):
        return kwargs.get(key)

    def format_field(self, value: Any, spec: str) -> str:
        if value is None:
            return ""
        formatters = {"bytes": format_bytes, "seconds": "{:.2f} s".format}
        if spec in formatters:
            return formatters[spec](value)
        return format(value, spec)


def figures(rows: Iterable[Row], columns: dict[str, str]) -> list[str]:
    """Return the lines of a Markdown table. `columns` maps each heading to a format string for a row."""
    cells = [[_Cells().vformat(form, (), row) for form in columns.values()] for row in rows]
    return table([*columns], cells)


def load(name: str) -> dict[str, Any]:
    """Return the result in docs/NAME.json."""
    return json.loads((ROOT / "docs" / f"{name}.json").read_text(encoding="utf-8"))


def right(row: Row) -> str:
    """Format the number of right answers and of questions as `right/asked`."""
    return f"{row['right']}/{row['asked']}"


def memory_of(pid: int) -> int:
    """Return a process's memory in bytes. On Linux, cached files are not included."""
    status = Path(f"/proc/{pid}/status")
    if not status.exists():
        ps = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True)
        return int(ps.stdout) * 1024
    line = re.search(r"^RssAnon:\s+(\d+)", status.read_text(), re.M)
    if line is None:
        raise OSError(f"process {pid} has ended")
    kibibytes = line[1]
    return int(kibibytes) * 1024


@contextlib.contextmanager
def watched(pid: int) -> Iterator[list[int]]:
    """Sample a process's memory every 50 ms in a thread and yield the growing list of samples in bytes."""
    samples = [memory_of(pid)]
    block_has_ended = threading.Event()

    def watch() -> None:
        while not block_has_ended.wait(0.05):
            samples.append(memory_of(pid))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    yield samples
    block_has_ended.set()
    watcher.join()
