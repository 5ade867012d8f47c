"""What the evaluations over documents share: their options, and the way from these to tables and files."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .._version import __version__
from ..errors import SnapKVError
from .options import ResultFiles, with_suffix, write_result

if TYPE_CHECKING:
    from ..evals.asking import Way
    from ..evals.score_tables import Page

LINE_EVERY = 30.0  # seconds
BATCH_SIZE = 8

Policies = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        metavar="POLICY",
        help="As for generate; repeat it to compare several. --memory and --verify are added to each.",
    ),
]
ByMask = Annotated[
    list[str] | None,
    typer.Option(
        "--by-mask",
        metavar="METHOD",
        help='Head-wise budgets, whose right answers are measured by hiding entries: "adakv of POLICY" or fastgen; '
        "repeat it to compare several.",
    ),
]
Setting = Annotated[
    str, typer.Option(help="Whether the question is in the prompt: known, later or both.")
]
Data = Annotated[str, typer.Option(metavar="DIR", help="Folder with your copy of the data.")]
Tasks = Annotated[
    list[str] | None,
    typer.Option("--task", metavar="TASK", help="Repeat it for several. By default all there."),
]
Documents = Annotated[
    int | None,
    typer.Option(min=1, help="Documents per task, from the first on. By default all."),
]
Output = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Write NAME.jsonl as answers come, and go on from it if it is there; at the end NAME.json, NAME.md "
        "and NAME.png.",
    ),
]
BatchSize = Annotated[
    int,
    typer.Option(
        "--batch-size",
        min=1,
        help="Questions answered at once, with the same answers: fewer where they would hold more than 16,384 "
        "entries, and one where --memory is given. With 1 the seconds of each are measured, too.",
    ),
]


def ways_of(
    policies: list[str] | None,
    memory: str,
    verify: str | None,
    verify_below: float,
    by_mask: list[str] | None = None,
) -> list[Way]:
    """The full cache, each policy with the memory and the verification, and what is measured by mask."""
    from ..engine.recalling import Recall
    from ..evals.asking import BY_MASK, FULL, Way
    from ..evals.headwise import headwise
    from ..policies import resolve_policy

    recall = Recall(memory, verify, verify_below)
    given = {"memory": memory, "verify": verify}
    options = {} if memory == "drop" else given | {"verify_below": verify_below}
    added = "".join(f", {name} {x}" for name, x in given.items() if x not in ("drop", None))
    ways = [Way(FULL)]
    for text in dict.fromkeys(policies or []):
        chosen = resolve_policy(policy=text)
        recall.require(chosen)
        ways.append(Way(f"{chosen}{added}", chosen, options))
    methods = (headwise(text) for text in dict.fromkeys(by_mask or []))
    return [*ways, *(Way(f"{method}{BY_MASK}", method) for method in methods)]


def settings_of(setting: str) -> list[str]:
    from ..evals.asking import SETTINGS

    return (
        list(SETTINGS) if setting == "both" else known("--setting", [setting], [*SETTINGS, "both"])
    )


def known(option: str, given: list[str], names: list[str]) -> list[str]:
    """What was given, each once; SnapKVError if it is none of the names."""
    for name in given:
        if name not in names:
            raise SnapKVError(
                f"{option} must be {', '.join(names[:-1])} or {names[-1]}, got {name!r}"
            )
    return list(dict.fromkeys(given))


def output_files(
    output: str | None, endings: Sequence[str] = (".jsonl", ".json", ".md", ".png")
) -> ResultFiles | None:
    """What is going to be written, by this rank."""
    from ..several.ranks import here

    def found() -> ResultFiles | None:
        writes = output is not None and here().rank == 0
        return ResultFiles(output, endings) if writes else None  # type: ignore[arg-type]

    return here().agreed(found)


def measure(
    name: str,
    model: Any,
    papers: Any,
    page: Page,
    ways: Sequence[Way],
    settings: Sequence[str],
    files: ResultFiles | None,
    as_json: bool,
    batch_size: int,
) -> None:
    """Ask everything, print the tables, and write the files."""
    from ..evals import score_tables
    from ..evals.asking import KEYS
    from ..evals.results import Results
    from ..reporting.setting import setting as measured
    from ..several.ranks import here
    from .print_table import print_table

    fixed = {**papers.setting(), "model": name, "mlx-snapkv": __version__}
    answers = None if files is None else with_suffix(files.base, ".jsonl")
    with here().together():
        results = Results(fixed, answers, KEYS, here())
        records = _ask(model, papers, ways, settings, results, answers, batch_size)
    summary = score_tables.summarise(records, page)
    command = shlex.join(["mlx-snapkv", *sys.argv[1:]])
    told = {"command": command, **fixed, **measured()}
    result: dict[str, Any] = {**told, "summary": summary, "records": records}
    if as_json:
        print(json.dumps(result))
    else:
        for table in score_tables.tables(summary, page):
            print_table(table)
    if files is not None:
        picture = with_suffix(files.base, ".png")
        score_tables.write_plot(result, page, picture)
        text = score_tables.markdown(result, page, picture.name)
        written = [*write_result(files.base, result, text), picture]
        print(files.told(written), file=sys.stderr if as_json else sys.stdout)


def _ask(
    model, papers, ways, settings, results, answers: Path | None, batch_size: int
) -> list[dict[str, Any]]:
    from ..evals.asking import run
    from .progress import StepBars

    try:
        with StepBars(LINE_EVERY) as bar:
            bar.start("documents", len(papers) * len(ways) * len(settings))
            return run(model, papers, ways, settings, results, bar.advance, batch_size)
    except KeyboardInterrupt:
        if answers is not None:
            tell_how_to_go_on(answers, bar.console)
        raise


def tell_how_to_go_on(answers: Path, console: Any) -> None:
    console.print(
        f"What was answered is in {answers}; the same command goes on from there.",
        soft_wrap=True,
    )
