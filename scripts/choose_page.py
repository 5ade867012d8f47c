"""docs/choose.md: the table of `mlx-snapkv policies --choose`."""

from __future__ import annotations

from results_page import table

from mlx_snapkv.cli.choices import CHOICES

PAGE = """# Which one to take

Written by `python scripts/write_docs.py`, from the rows of `mlx-snapkv policies --choose`. Why, and what else there is:
[choosing-a-policy.md](choosing-a-policy.md).

{rows}

## Commands

Replace MODEL, TEXT and QUESTION. A number of entries, such as `top_k=4096`, keeps memory the same for any prompt; a
share, such as `budget=12.5%`, grows with the prompt.

{commands}
Measure on your own documents how far answers move with [`mlx-snapkv eval fidelity`](measuring.md), and look at what a
policy keeps of your prompt with [`mlx-snapkv inspect`](commands.md#mlx-snapkv-inspect).
"""


def page() -> str:
    """docs/choose.md."""
    rows = [(c.when, c.why, _links(c.pages)) for c in CHOICES]
    commands = "".join(
        f"{c.when[0].upper()}{c.when[1:]}:\n\n```\n{_folded(c.command)}\n```\n\n" for c in CHOICES
    )
    return PAGE.format(
        rows="\n".join(table(("you have", "what to do", "measured in"), rows)),
        commands=commands.rstrip("\n") + "\n",
    )


def _links(pages: tuple[str, ...]) -> str:
    return ", ".join(f"[{page.partition('.md')[0]}]({page})" for page in pages)


def _folded(command: str) -> str:
    """A command in lines that fit a page, broken before its options."""
    lines = [""]
    for word in command.replace(" --", "\n--").split("\n"):
        fits = len(lines[-1]) + len(word) < 100 or not lines[-1]
        lines[-1:] = [f"{lines[-1]} {word}".strip()] if fits else [lines[-1], word]
    return " \\\n    ".join(lines)
