"""`mlx-snapkv eval suite`: tasks that tell policies apart, the question known or coming later."""

from __future__ import annotations

import json
import shlex
import sys
from typing import Annotated

import typer

from .._version import __version__
from ..demo.tasks import TASKS
from ..errors import SnapKVError
from . import flags
from .loading import load_model
from .options import ResultFiles, whole_numbers, with_suffix, write_result

LEAST = 512  # tokens of a prompt
LINE_EVERY = 30.0  # seconds

Policies = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        metavar="POLICY",
        help="As for generate; repeat it to compare several. --memory and --verify are added to each.",
    ),
]


def suite(
    model: flags.Model = "demo-tasks",
    policy: Policies = None,
    memory: flags.Memory = "drop",
    store_dir: flags.StoreDir = None,
    verify: flags.Verify = None,
    verify_below: flags.VerifyBelow = 0.999,
    task: Annotated[
        list[str] | None,
        typer.Option(metavar="TASK", help=f"Of {', '.join(TASKS)}; repeat it. By default all."),
    ] = None,
    setting: Annotated[
        str, typer.Option(help="Whether the question is in the prompt: known, later or both.")
    ] = "both",
    length: Annotated[str, typer.Option(help="Tokens of the prompts, with commas.")] = "2048",
    documents: Annotated[int, typer.Option(min=1, help="Documents per task and length.")] = 4,
    questions: Annotated[int, typer.Option(min=1, help="Questions a document, at most.")] = 5,
    seed: flags.DocumentSeed = 0,
    output: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Write NAME.jsonl as answers come, and go on from it if it is there; at the end NAME.json, NAME.md "
            "and NAME.png.",
        ),
    ] = None,
    as_json: flags.AsJson = False,
) -> None:
    """Ask harder questions: look-alikes, several facts, values overwritten, chains; the full cache's answers beside.

    mlx-snapkv eval suite --policy keydiff:budget=6% --policy snapkv:budget=6%,n_sink=4,n_window=32,min_ctx=0
    """
    from ..engine.recalling import Recall
    from ..evals import suite_tables
    from ..evals.results import Results
    from ..evals.suite import FULL, KEYS, SETTINGS, Suite, Way, run
    from ..policies import resolve_policy
    from ..reporting.setting import setting as measured
    from .print_table import print_table
    from .progress import StepBars

    tasks = _known("--task", task or list(TASKS), list(TASKS))
    settings = (
        list(SETTINGS) if setting == "both" else _known("--setting", [setting], [*SETTINGS, "both"])
    )
    lengths = whole_numbers("--length", length, LEAST)
    recall = Recall(memory, verify, verify_below)
    more = "".join(
        f", {name} {given}"
        for name, given in (("memory", memory), ("verify", verify))
        if given not in ("drop", None)
    )
    options = {} if memory == "drop" else vars(recall) | {"verify_below": verify_below}
    options.pop("below", None)
    ways = [Way(FULL)]
    for text in dict.fromkeys(policy or []):
        chosen = resolve_policy(policy=text)
        recall.require(chosen)
        ways.append(Way(f"{chosen}{more}", chosen, options))
    loaded, tokenizer = load_model(model)
    if not tokenizer.has_chat_template:
        raise SnapKVError(
            f"--model {model}: it has no chat template, so it can't be asked anything"
        )
    files = None
    if output is not None:
        files = ResultFiles(output, [".jsonl", ".json", ".md", ".png"])
    asked = Suite(tokenizer, tasks, lengths, documents, questions, seed)
    fixed = {**asked.setting(), "model": model, "mlx-snapkv": __version__}
    base = None if files is None else files.base
    results = Results(fixed, None if base is None else with_suffix(base, ".jsonl"), KEYS)
    with StepBars(LINE_EVERY) as bar:
        n = len(tasks) * len(lengths) * documents * len(ways) * len(settings)
        bar.start("documents", n, 0)
        records = run(loaded, asked, ways, settings, results, bar.advance)
    result = {
        "command": shlex.join(["mlx-snapkv", *sys.argv[1:]]),
        **fixed,
        **measured(),
        "summary": suite_tables.summarise(records),
        "records": records,
    }
    if as_json:
        print(json.dumps(result))
    else:
        for table in suite_tables.tables(records):
            print_table(table)
    if files is not None:
        picture = with_suffix(files.base, ".png")
        suite_tables.write_plot(result, picture)
        page = suite_tables.markdown(result, picture.name)
        written = [*write_result(files.base, result, page), picture]
        print(files.told(written), file=sys.stderr if as_json else sys.stdout)


def _known(option: str, given: list[str], known: list[str]) -> list[str]:
    for name in given:
        if name not in known:
            raise SnapKVError(
                f"{option} must be {', '.join(known[:-1])} or {known[-1]}, got {name!r}"
            )
    return list(dict.fromkeys(given))
