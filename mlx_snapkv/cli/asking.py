"""What the evaluations of answers share: their options, and the way from these to tables and files."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .._version import __version__
from ..engine.report import VERIFY_BELOW
from ..errors import SnapKVError
from .options import ResultFiles, with_suffix, write_result

if TYPE_CHECKING:
    from ..evals.answering import Method
    from ..evals.score_tables import Page

LINE_EVERY = 30.0  # seconds

Policies = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        metavar="POLICY",
        help="As for generate, such as keydiff:budget=12.5%, a share of the prompt; repeat it to compare several.",
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
Lengths = Annotated[str, typer.Option("--length", help="Tokens of the prompts, with commas.")]
Output = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Write NAME.jsonl as answers come, and go on from it if it is there; at the end NAME.json and NAME.md.",
    ),
]


def methods_of(
    policies: Sequence[str] | None,
    memory: str = "drop",
    verify: str | None = None,
    verify_below: float = VERIFY_BELOW,
    by_mask: list[str] | None = None,
) -> list[Method]:
    """The full cache, each policy with the memory and the verification, and what is measured by mask."""
    from ..engine.recalling import Recall
    from ..evals.answering import BY_MASK, FULL, Method
    from ..evals.headwise import headwise
    from ..policies import resolve_policy

    recall = Recall(memory, verify, verify_below)
    given = {"memory": memory, "verify": verify}
    options = {} if memory == "drop" else given | {"verify_below": verify_below}
    added = "".join(f", {name} {x}" for name, x in given.items() if x not in ("drop", None))
    methods = [Method(FULL)]
    for text in dict.fromkeys(policies or []):
        chosen = resolve_policy(policy=text)
        recall.require(chosen)
        methods.append(Method(f"{chosen}{added}", chosen, options))
    masked = (headwise(text) for text in dict.fromkeys(by_mask or []))
    return [*methods, *(Method(f"{method}{BY_MASK}", method) for method in masked)]


def settings_of(setting: str) -> list[str]:
    from ..evals.answering import SETTINGS

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
    output: str | None, endings: Sequence[str] = (".jsonl", ".json", ".md")
) -> ResultFiles | None:
    """What is going to be written."""
    return None if output is None else ResultFiles(output, endings)


def require_template(name: str, tokenizer: Any) -> None:
    """Raises: SnapKVError: a model without a chat template can't be asked anything."""
    if not tokenizer.has_chat_template:
        raise SnapKVError(f"--model {name}: it has no chat template, so it can't be asked anything")


def measure(
    name: str,
    model: Any,
    dataset: Any,
    page: Page,
    methods: Sequence[Method],
    settings: Sequence[str],
    files: ResultFiles | None,
    as_json: bool,
    plots: Callable[[dict[str, Any], Path], list[Path]] | None = None,
) -> None:
    """Ask everything, print the tables, and write the files.

    Args:
        plots: writes pictures of a result beside a path, without its ending.
    """
    from ..evals import score_tables
    from ..evals.asking import require_compression
    from ..evals.results import Results
    from ..reporting.setting import setting as measured
    from .print_table import print_table

    require_compression(model, methods, dataset.lengths)
    fixed = {**dataset.setting(), "model": name, "mlx-snapkv": __version__}
    answers = None if files is None else with_suffix(files.base, ".jsonl")
    records = _ask(model, dataset, methods, settings, Results(fixed, answers), answers)
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
        drawn = plots(result, files.base) if plots else []
        text = score_tables.markdown(result, page, [path.name for path in drawn])
        written = [*write_result(files.base, result, text), *drawn]
        print(files.told(written), file=sys.stderr if as_json else sys.stdout)


def _ask(
    model: Any,
    dataset: Any,
    methods: Sequence[Method],
    settings: Sequence[str],
    results: Any,
    answers: Path | None,
) -> list[dict[str, Any]]:
    from ..evals.asking import run
    from .progress import DocumentBar

    try:
        with DocumentBar(len(dataset), LINE_EVERY) as bar:
            return run(model, dataset, methods, settings, results, bar.done)
    except KeyboardInterrupt:
        if answers is not None:
            tell_how_to_go_on(answers, bar.console)
        raise


def tell_how_to_go_on(answers: Path, console: Any) -> None:
    console.print(
        f"What was answered is in {answers}; the same command goes on from there.",
        soft_wrap=True,
    )
