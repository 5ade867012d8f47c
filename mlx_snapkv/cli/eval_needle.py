"""`mlx-snapkv eval needle` and `lines`: facts hidden at every depth of prompts of every length."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..demo import MODELS
from ..errors import SnapKVError
from . import asking, flags
from .loading import load_model
from .options import whole_numbers
from .prompt_text import read_file

if TYPE_CHECKING:
    from ..evals.haystack import Haystack

LEAST = 256  # tokens of a prompt
POOLED = "snapkv:budget=12.5%,n_window=32,obs_window=32,lookahead=0"
POOLING = [*(f"{POOLED},pool=avg,pool_kernel={width}" for width in (1, 7, 21)), POOLED]

Depths = Annotated[
    int, typer.Option(min=1, max=101, help="Depths to hide at, evenly from start to end.")
]
Questions = Annotated[int, typer.Option(min=1, help="Questions per length and depth.")]


def needle(
    model: flags.Model = "demo",
    policy: asking.Policies = None,
    setting: asking.Setting = "known",
    length: asking.Lengths = "2048,4096",
    depths: Depths = 5,
    questions: Questions = 1,
    needles: Annotated[
        int, typer.Option(min=1, max=1000, help="Facts hidden in a document; one is asked for.")
    ] = 1,
    seed: flags.DocumentSeed = 0,
    haystack: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="Text to hide facts in; repeat it for several files."),
    ] = None,
    output: asking.Output = None,
    as_json: flags.AsJson = False,
) -> None:
    """Hide a fact at every depth of prompts of every length, and ask for it at the end.

    mlx-snapkv eval needle --policy keydiff:budget=12.5% --policy snapkv:budget=12.5%,lookahead=0
    """
    from ..evals.needle import Needle

    text = "\n\n".join(read_file("--haystack", file) for file in haystack or [])
    if haystack and not text.strip():
        raise SnapKVError(f"--haystack {' '.join(haystack)}: there is no text in it")
    make = partial(Needle, needles=needles, text=text or None)
    grid = {"lengths": _lengths(length), "n_depths": depths, "n_documents": questions, "seed": seed}
    _evaluate(model, make, grid, policy or [], setting, output, as_json)


def lines(
    model: flags.Model = "demo",
    policy: asking.Policies = None,
    setting: asking.Setting = "known",
    length: asking.Lengths = "2048,4096",
    depths: Depths = 5,
    questions: Questions = 1,
    seed: flags.DocumentSeed = 0,
    output: asking.Output = None,
    as_json: flags.AsJson = False,
) -> None:
    """Ask for one of many lines that differ in a name and a number only (LongEval's lines).

    Without --policy, SnapKV with 1/8 of the entries: without pooling, pooled over 7 and 21 as in the paper, and its
    default. These use lookahead=0: with its default the full cache would answer the whole number. The embedded
    models, which don't know LongEval's words, get lines of their own.
    """
    from ..evals.lines import FACTS, LONGEVAL, Lines

    make = partial(Lines, wording=FACTS if model in MODELS else LONGEVAL)
    grid = {"lengths": _lengths(length), "n_depths": depths, "n_documents": questions, "seed": seed}
    _evaluate(model, make, grid, policy or POOLING, setting, output, as_json)


def _lengths(text: str) -> list[int]:
    lengths = whole_numbers("--length", text, LEAST)
    if not lengths:
        raise SnapKVError("--length is empty: give at least one number of tokens")
    return list(dict.fromkeys(lengths))


def _evaluate(
    name: str,
    make: Callable[..., Haystack],
    grid: dict[str, Any],
    policies: list[str],
    setting: str,
    output: str | None,
    as_json: bool,
) -> None:
    """Ask, and draw a heat map of every method."""
    from ..evals.haystack import PAGE
    from ..reporting import heatmap

    methods, settings = asking.methods_of(policies), asking.settings_of(setting)
    maps = [heatmap.ending(method.name, each) for method in methods for each in settings]
    files = asking.output_files(output, [".jsonl", ".json", ".md", *maps])
    model, tokenizer = load_model(name)
    asking.require_template(name, tokenizer)
    dataset, draw = make(tokenizer, **grid), heatmap.write_heatmaps
    asking.measure(name, model, dataset, PAGE, methods, settings, files, as_json, draw)
