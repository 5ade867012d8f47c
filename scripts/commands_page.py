"""docs/commands.md, written from the command line itself."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import typer
from results_page import table

from mlx_snapkv.cli.app import app

LARGEST = 2**32  # limits above it are there for the machine and are not told

PAGE = """# The commands

Written by `python scripts/write_docs.py` from the command line itself, never typed. `mlx-snapkv COMMAND --help` prints
the same. A mistake is one line on stderr and exit code 2.

{contents}
"""


def page() -> str:
    """docs/commands.md."""
    found = list(commands())
    anchors = {name: f"mlx-snapkv {name}".replace(" ", "-") for name, _ in found}
    contents = [f"- [`mlx-snapkv {name}`](#{anchor})" for name, anchor in anchors.items()]
    text = PAGE.format(contents="\n".join(contents))
    for name, command in found:
        text += f"\n## `mlx-snapkv {name}`\n\n{_help(command)}\n"
        rows = [_row(option) for option in command.params if option.name != "help"]
        if rows:
            text += "\n" + "\n".join(table(("option", "default", "meaning"), rows)) + "\n"
    return text


def commands() -> Iterator[tuple[str, Any]]:
    """Every command that does something, with the name it is called by."""
    yield from _below(typer.main.get_command(app), "")


def _below(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    if not hasattr(command, "commands"):
        yield name, command
        return
    for part, below in command.commands.items():
        yield from _below(below, f"{name} {part}".strip())


def _help(command: Any) -> str:
    """The help text, its examples as a block of code."""
    paragraphs = inspect.cleandoc(command.help or "").split("\n\n")
    return "\n\n".join(map(_paragraph, paragraphs)).strip()


def _paragraph(text: str) -> str:
    lines = text.strip("\n").replace("\b\n", "").splitlines()
    if all(line.lstrip().startswith("mlx-snapkv") for line in lines) or "\b" in text:
        return "\n".join(["```", *inspect.cleandoc("\n" + "\n".join(lines)).splitlines(), "```"])
    return "\n".join(line.strip() for line in lines)


def _row(option: Any) -> tuple[str, str, str]:
    names = ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])
    given = isinstance(option.default, (str, int, float)) and not isinstance(option.default, bool)
    default = f"`{option.default}`" if given else "needed" if option.required else ""
    return names, default, " ".join(filter(None, (option.help, _range(option))))


def _range(option: Any) -> str:
    """What numbers may be given; older typers say it in the option's type."""
    holder = option if hasattr(option, "min") else getattr(option, "type", None)
    least, most = getattr(holder, "min", None), getattr(holder, "max", None)
    if least is None:
        return ""
    return f"({least} to {most})" if most and most < LARGEST else f"(at least {least})"
