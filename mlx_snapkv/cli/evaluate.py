"""`mlx-snapkv eval`: how many hidden facts are still found when the cache is compressed."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .._version import __version__
from ..demo import MODELS
from ..errors import SnapKVError
from ..evals import summary
from ..evals.grid import Cell, Task, cells
from ..evals.lines import FACTS, LONGEVAL, Lines
from ..evals.needle import Needle
from ..evals.results import Results
from ..reporting import heatmap
from . import asking, flags
from .command import Command
from .eval_fields import longbench, ruler, scbench
from .eval_lm import lm
from .eval_suite import suite
from .loading import load_model
from .options import whole_numbers, with_suffix, write_result
from .prompt_text import read_file

if TYPE_CHECKING:
    from ..evals.run import Contenders

LEAST = 256  # tokens of a prompt
POOLED = "snapkv:budget=12.5%,n_sink=4,n_window=32,min_ctx=0,lookahead=0"
POOLING = [*(f"{POOLED},pool_kernel={width}" for width in (1, 5, 7)), POOLED]

app = typer.Typer(help="Ask for facts in long prompts, with the full cache and with policies.")


app.command("suite", cls=Command)(suite)
app.command("ruler", cls=Command)(ruler)
app.command("longbench", cls=Command)(longbench)
app.command("scbench", cls=Command)(scbench)
app.command("lm", cls=Command)(lm)


@app.callback(invoke_without_command=True)
def root(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


Policies = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        metavar="POLICY",
        help="As for generate, such as keydiff:budget=12.5%, a share of the prompt. Repeat it to compare several.",
    ),
]
Lengths = Annotated[str, typer.Option("--length", help="Tokens of the prompts, with commas.")]
Depths = Annotated[
    int, typer.Option(min=1, max=101, help="Depths to hide at, evenly from start to end.")
]
Questions = Annotated[int, typer.Option(min=1, help="Questions per length and depth.")]
Output = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Write NAME.jsonl as answers come, and go on from it if it is there; at the end NAME.json, NAME.md "
        "and a heat map for each policy.",
    ),
]


@app.command("needle", cls=Command)
def needle(
    model: flags.Model = "demo",
    pipeline: flags.Pipeline = False,
    policy: Policies = None,
    length: Lengths = "2048,4096",
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
    batch_size: asking.BatchSize = asking.BATCH_SIZE,
    output: Output = None,
    as_json: flags.AsJson = False,
) -> None:
    """Hide a fact at every depth of prompts of every length, and ask for it at the end.

    mlx-snapkv eval needle --policy keydiff:budget=12.5% --policy "snapkv:budget=12.5%,n_sink=4,n_window=32,min_ctx=0"
    """
    from ..several.ranks import here

    files = [partial(read_file, "--haystack", file) for file in haystack or []]
    text = "\n\n".join(here().from_first(file) for file in files)
    if haystack and not text.strip():
        raise SnapKVError(f"--haystack {' '.join(haystack)}: there is no text in it")
    grid = cells(_lengths(length), depths, questions)
    task = partial(Needle, seed=seed, needles=needles, haystack=text or None)
    _evaluate(model, task, grid, policy or [], output, as_json, batch_size, pipeline)


@app.command("lines", cls=Command)
def lines(
    model: flags.Model = "demo",
    pipeline: flags.Pipeline = False,
    policy: Policies = None,
    length: Lengths = "2048,4096",
    depths: Depths = 5,
    questions: Questions = 1,
    seed: flags.DocumentSeed = 0,
    batch_size: asking.BatchSize = asking.BATCH_SIZE,
    output: Output = None,
    as_json: flags.AsJson = False,
) -> None:
    """Ask for one of many lines that differ in a name and a number only (LongEval's lines).

    Without --policy, SnapKV with 1/8 of the entries, without pooling and pooled over 5, 7 and its default. These use
    lookahead=0, since with its default of 4 the full cache would answer most of a number. The embedded models,
    which don't know LongEval's words, get lines of their own.
    """
    grid = cells(_lengths(length), depths, questions)
    task = partial(Lines, seed=seed, wording=FACTS if model in MODELS else LONGEVAL)
    _evaluate(model, task, grid, policy or POOLING, output, as_json, batch_size, pipeline)


def _lengths(text: str) -> list[int]:
    lengths = whole_numbers("--length", text, LEAST)
    if not lengths:
        raise SnapKVError("--length is empty: give at least one number of tokens")
    return lengths


def _evaluate(
    name: str,
    make_task: Callable[[Any], Task],
    grid: list[Cell],
    policies: list[str],
    output: str | None,
    as_json: bool,
    batch_size: int,
    pipeline: bool,
) -> None:
    from ..evals.run import check, contenders
    from ..reporting.setting import setting
    from ..several.ranks import here
    from .print_table import print_table

    chosen = contenders(policies)
    model, tokenizer = load_model(name, pipeline=pipeline)
    if not tokenizer.has_chat_template:
        raise SnapKVError(f"--model {name}: it has no chat template, so it can't be asked anything")
    check(model, chosen, list(dict.fromkeys(cell.length for cell in grid)))
    task = make_task(tokenizer)
    about = setting()
    fixed = {**task.setting(), "model": name, "mlx-snapkv": __version__}
    endings = [".jsonl", ".json", ".md", *map(heatmap.ending, chosen)]
    files = asking.output_files(output, endings)
    base = None if files is None else files.base
    answers = None if base is None else with_suffix(base, ".jsonl")
    with here().together():
        results = Results(fixed, answers, ranks=here())
        records = _ask(model, tokenizer, task, grid, chosen, results, base, batch_size)
    command = shlex.join(["mlx-snapkv", *sys.argv[1:]])
    found = summary.summarise(records)
    result = {"command": command, **fixed, **about, "summary": found, "records": records}
    if as_json:
        print(json.dumps(result))
    else:
        print_table(summary.table(found, f"Retrieval: {result['task']}"))
    if files is not None:
        base = files.base
        plots = heatmap.write_heatmaps(result, base)
        page = summary.markdown(result, [plot.name for plot in plots])
        written = [*write_result(base, result, page), *plots]
        print(files.told(written), file=sys.stderr if as_json else sys.stdout)


def _ask(
    model,
    tokenizer,
    task: Task,
    grid: list[Cell],
    chosen: Contenders,
    results: Results,
    base,
    batch_size: int,
) -> list[dict[str, Any]]:
    from ..evals.run import run
    from .progress import StepBars

    done = sum(
        results.get({"policy": name, **vars(cell)}) is not None for cell in grid for name in chosen
    )
    try:
        with StepBars(asking.LINE_EVERY) as bar:
            bar.start("asking", len(grid) * len(chosen), done)
            given = tokenizer, task, grid, chosen, results, bar.advance
            return run(model, *given, batch_size=batch_size)
    except KeyboardInterrupt:
        if base is not None:
            asking.tell_how_to_go_on(with_suffix(base, ".jsonl"), bar.console)
        raise
