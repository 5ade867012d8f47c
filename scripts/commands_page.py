"""docs/commands.md, written from the command line itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer
from typer.cli import get_docs_for_click

from mlx_snapkv.cli.app import app

NAME = "mlx-snapkv"
HEAD = """# The commands

Written by `python scripts/write_docs.py` from the command line itself, never typed. `mlx-snapkv COMMAND --help` prints
the same. A mistake is one line on stderr and exit code 2.
"""


def page() -> str:
    """docs/commands.md."""
    command = typer.main.get_command(app)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command, info_name=NAME), name=NAME)
    text = re.sub(r"\*\*Usage\*\*:\n\n```console\n.*?```\n\n", "", text, flags=re.S)
    text = re.sub(r"\* `--help`: Show this message and exit\.\n", "", text)
    text = re.sub(r"\*\*Options\*\*:\n\n(?!\*)", "", text)
    text = re.sub(r" <[^>`]*>`", "`", text)
    # Examples are blocks of code.
    text = re.sub(rf"^(?:\x08\n|(?=\s*{NAME} ))((?:.+\n)+)", _example, text, flags=re.M)
    return HEAD + text.partition("\n")[2].rstrip() + "\n"


def _example(found: re.Match[str]) -> str:
    lines = (line.removeprefix("  ") for line in found[1].splitlines())
    return "\n".join(["```", *lines, "```", ""])


def commands() -> Iterator[tuple[str, Any]]:
    """Every command that does something, with the name it is called by."""
    yield from _below(typer.main.get_command(app), "")


def _below(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    if not hasattr(command, "commands"):
        yield name, command
        return
    for part, below in command.commands.items():
        yield from _below(below, f"{name} {part}".strip())
