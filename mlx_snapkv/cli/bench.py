"""`mlx-snapkv bench`: the ways to hold a prompt's entries, side by side in one process."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import SnapKVError
from ..reporting import plots, tables
from . import flags
from .interrupts import listen
from .loading import load_model
from .options import ResultFiles, whole_numbers, write_result
from .serve import require_server

if TYPE_CHECKING:
    from ..bench.run import Plan

LEAST = 1024  # tokens of a context: 1/16 of them are the fewest entries that the default policy can share out
CONTEXTS = "4096,16384,32768,49152,65536,131072"
LONG_PROMPTS = "16384,32768,65536"
BOOKS = "16384,65536,262144"
PROMPTS = "8192,16384"
BATCH_PROMPTS = "8192"


def bench(
    model: Annotated[
        str | None,
        typer.Option(help="Model folder, repository or embedded name; default: a random LLaMA."),
    ] = None,
    snapkv: Annotated[
        str | None,
        typer.Option(help="SnapKV's options; default: 1/16 of each context's entries, no gate."),
    ] = None,
    context: Annotated[str, typer.Option(help="Context lengths to decode at.")] = CONTEXTS,
    verified: Annotated[
        str, typer.Option(help="Context lengths at which verified answers are decoded.")
    ] = "16384,32768,65536",
    prompt_tokens: Annotated[
        str | None,
        typer.Option(
            "--prompt-tokens",
            "-p",
            help=f"Prompt lengths of whole requests; default: {PROMPTS}, with --batches or --server {BATCH_PROMPTS}.",
        ),
    ] = None,
    long_prompts: Annotated[
        str | None,
        typer.Option(
            help=f"Prompt lengths to read within a fixed budget; default: {LONG_PROMPTS}, with --book {BOOKS}."
        ),
    ] = None,
    book: Annotated[
        bool,
        typer.Option(
            "--book",
            help="Only this: prompts of --long-prompts tokens read with every entry in a file, then questions.",
        ),
    ] = False,
    batches: Annotated[
        str,
        typer.Option(
            help="Only this: so many prompts of -p tokens at once, such as 1,4,8,16, in mlx-lm's batches and in ours."
        ),
    ] = "",
    server: Annotated[
        str,
        typer.Option(
            help="Only this: so many clients at once, such as 1,4,8, that ask mlx_lm.server and ours about -p tokens."
        ),
    ] = "",
    num_trials: Annotated[
        int,
        typer.Option("--num-trials", "-n", min=1, help="Requests with the full cache and SnapKV."),
    ] = 3,
    steps: Annotated[int, typer.Option(min=1, max=200, help="Steps decoded per cache.")] = 50,
    needle: Annotated[
        bool, typer.Option("--needle", help="Also ask for facts hidden in documents of -p tokens.")
    ] = False,
    questions: flags.Facts = 8,
    output: Annotated[
        str | None, typer.Option(help="Write NAME.json, NAME.md and plots.", metavar="NAME")
    ] = None,
) -> None:
    """Measure the full cache, mlx-lm's --max-kv-size and --kv-bits, and SnapKV, in turn, in one process."""
    from ..bench.random_model import NAME, make_random_model
    from ..bench.run import run
    from ..reporting.setting import setting
    from .print_table import print_table
    from .progress import SavingBars

    for option, given in (("--needle", needle), ("--server", server)):
        if given and model is None:
            raise SnapKVError(f"{option} needs a model that can answer: --model demo, for one")
    sizes = whole_numbers("--batches", batches, least=1)
    clients = whole_numbers("--server", server, least=1)
    if clients:
        require_server("bench --server", "httpx")
    usual = BATCH_PROMPTS if sizes or clients else PROMPTS
    prompts = prompt_tokens if prompt_tokens is not None else usual
    long = long_prompts if long_prompts is not None else BOOKS if book else LONG_PROMPTS
    plan = _plan(snapkv, context, verified, prompts, long, num_trials, steps)
    if needle:
        plan = replace(plan, questions=questions)
    if book or sizes:
        plan = _only(plan, book, sizes)
    endings = [".json", ".md", *(f"-{plot}.png" for plot in plots.PLOTS)]
    files = None if output is None else ResultFiles(output, endings)
    for n in (*plan.contexts, *plan.verified, *plan.prompts, *plan.batch_prompts):
        plan.policy_for(n)  # a mistake in the options shows before anything is measured
    listen()
    loaded, tokenizer = (make_random_model(), None) if model is None else load_model(model)
    command = shlex.join(["mlx-snapkv", *sys.argv[1:]])
    about = {"command": command, **setting(), "model": model or NAME}
    with SavingBars(about, files) as bars:
        if clients:
            from ..bench.servers import measure_servers

            del loaded  # each server has its own
            found = measure_servers(str(model), tokenizer, plan, clients, bars)
        else:
            found = run(loaded, tokenizer, plan, bars)
    result = about | found
    for table in tables.tables(result):
        print_table(table)
        print()
    if files is not None:
        base = files.base
        page = tables.markdown(result, base.name)
        print(files.told([*write_result(base, result, page), *plots.write_plots(result, base)]))


def _plan(
    snapkv: str | None,
    context: str,
    verified: str,
    prompts: str,
    long_prompts: str,
    trials: int,
    steps: int,
) -> Plan:
    """What is measured unless only some of it is wanted."""
    from ..bench.contenders import snapkv_for
    from ..bench.run import BOUNDED, Plan
    from ..policies import SnapKV

    given = None if snapkv is None else SnapKV.from_string(snapkv)
    fills = BOUNDED.quotas(0, 1)[0].entries + BOUNDED.block  # tokens that fill a budget's buffers
    return Plan(
        contexts=whole_numbers("--context", context, LEAST),
        verified=whole_numbers("--verified", verified, LEAST),
        prompts=whole_numbers("--prompt-tokens", prompts, LEAST),
        long_prompts=whole_numbers("--long-prompts", long_prompts, fills),
        trials=trials,
        steps=steps,
        questions=0,
        policy_for=lambda n: given or snapkv_for(n),
    )


def _only(plan: Plan, book: bool, batches: list[int]) -> Plan:
    """Books or batches, of the same lengths, and nothing else."""
    return replace(
        plan,
        contexts=[],
        prompts=[],
        verified=[],
        long_prompts=[],
        questions=0,
        books=plan.long_prompts if book else [],
        batches=batches,
        batch_prompts=plan.prompts if batches else [],
    )
