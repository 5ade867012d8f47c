"""An inspection on the terminal: a line a layer, the sentences, the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from ..inspecting.inspection import Inspection
    from ..inspecting.sentences import Sentence

SHADES = " ░▒▓█"
SENTENCES = 10
WIDEST = 160  # columns of a map
COLOR = "cyan"


def print_inspections(inspections: Sequence[Inspection]) -> None:
    """What was kept, drawn as wide as the terminal."""
    for i, found in enumerate(inspections):
        if i:
            print("\n")
        _print(found)


def _print(found: Inspection) -> None:
    console = Console(highlight=False)
    console.print(Text(found.policy, style="bold"))
    console.print(Text(str(found.report)))
    console.print()
    for line in _map(found, console.width):
        console.print(line, no_wrap=True, crop=True)
    console.print()
    if found.sentences:
        console.print(Text(f"Most kept sentences ({_measure(found)})", style="bold"))
        for rank, sentence in enumerate(found.sentences[:SENTENCES], start=1):
            words = " ".join(sentence.text.split())
            line = Text(f"{rank:3}  {_share(sentence):>5}  {words}", no_wrap=True)
            line.truncate(max(40, console.width), overflow="ellipsis")
            console.print(line)
        console.print()
    console.print(Text("Answer", style="bold"))
    console.print(Text(found.answer), soft_wrap=True)


def _map(found: Inspection, width: int) -> list[Text]:
    """A line a layer, and one for the positions."""
    names = [f"layer {layer}" for layer in found.layers]
    margin = max(map(len, names)) + 1
    ends = ["" if share is None else f"{share:5.0%}" for share in found.shares]
    told = "votes" if any(ends) else ""
    density = found.density(max(8, min(WIDEST, width - margin - 7)))
    lines = []
    for name, row, end in zip(names, density, ends, strict=True):
        # A little is to be seen, too: half of the shades are for the first quarter.
        shades = "".join(SHADES[-int(-(share**0.5) * (len(SHADES) - 1) // 1)] for share in row)
        lines.append(Text.assemble(f"{name:<{margin}}", (shades, COLOR), f" {end}"))
    last = f"token {found.n_tokens - 1}"
    scale = f"token 0{last:>{max(len(last) + 1, density.shape[1] - 7)}}"
    lines.append(Text(f"{'':<{margin}}{scale} {told}", style="dim"))
    if found.layers_without:
        n = len(found.layers_without)
        which = ", ".join(map(str, found.layers_without))
        lines.append(
            Text(
                f"layer{'s' * (n > 1)} {which}: no entries to keep or drop (linear attention, or a sliding window)",
                style="dim",
                overflow="fold",
                no_wrap=False,
            )
        )
    return lines


def _measure(found: Inspection) -> str:
    if found.sentences[0].votes is not None:
        return "by their share of the votes for the entries chosen"
    if found.sentences[0].chosen:
        return "by the share of their entries that were chosen"
    return "nothing was chosen: these are kept whatever they say"


def _share(sentence: Sentence) -> str:
    share = sentence.votes or sentence.chosen
    return f"{share:.1%}" if share else "fixed"
