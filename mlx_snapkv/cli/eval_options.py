"""What the evaluations share: their options, and the way from a measurement to tables and files."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from ..errors import SnapKVError
from .options import AsJson
from .results import ResultFiles, about, print_table, write_result

if TYPE_CHECKING:
    from ..evals.answering import Method
    from ..evals.loop import Record, Results
    from ..reporting.table import Table

    Run = Callable[[Results, Callable[..., None]], list[Record]]
    Shown = tuple[list[Table], str, list[Path]]  # tables, page and pictures

Policies = Annotated[
    list[str] | None,
    Option(
        "--policy",
        metavar="POLICY",
        help="As for generate, such as keydiff:budget=12.5%, a share of the prompt; repeat it to compare several.",
    ),
]
Setting = Annotated[
    str, Option(help="Whether the question is in the prompt: known, later or both.")
]
Lengths = Annotated[str, Option("--length", help="Tokens of the prompts, with commas.")]


@dataclass(frozen=True)
class ResultOptions:
    """What becomes of a result: it is printed, and written to files."""

    output: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="Write NAME.jsonl as results come, and go on from it if it is there; at the end NAME.json and "
            "NAME.md.",
        ),
    ] = None
    as_json: AsJson = False

    def files(self, *endings: str) -> ResultFiles | None:
        """What is going to be written."""
        if self.output is None:
            return None
        return ResultFiles(self.output, (".jsonl", ".json", ".md", *endings))

    def measure(
        self,
        files: ResultFiles | None,
        fixed: dict[str, Any],
        results: Results,
        n_documents: int,
        run: Run,
        summarise: Callable[[list[Record]], list[dict[str, Any]]],
        show: Callable[[dict[str, Any]], Shown],
    ) -> None:
        """Measure what the files do not hold yet, with a bar; print the result, and write it.

        Args:
            fixed: what results that go on from each other have in common.
            run: the records, from those there are and a callback for every document.
            show: what is shown of a result.
        """
        from .progress import StepBars

        with StepBars(None if files is None else files.path(".jsonl")) as bars:
            bars.start("documents", n_documents)
            records = run(results, bars.done)
        result = {**about(), **fixed, "summary": summarise(records), "records": records}
        tables, page, pictures = show(result)
        if self.as_json:
            print(json.dumps(result))
        else:
            for table in tables:
                print_table(table)
        if files is not None:
            written = [*write_result(files.base, result, page), *pictures]
            print(files.summary(written), file=sys.stderr if self.as_json else sys.stdout)


def results_in(
    files: ResultFiles | None, fixed: dict[str, Any], keys: tuple[str, ...] | None = None
) -> Results:
    """The records that are there; `keys` identify a record. SnapKVError if they are of another run."""
    from ..evals.loop import KEYS, Results

    return Results(fixed, None if files is None else files.path(".jsonl"), keys or KEYS)


def methods_of(
    policies: Sequence[str] | None,
    memory: str = "drop",
    verify: str | None = None,
    refresh: str = "token",
    by_mask: Sequence[str] | None = None,
) -> list[Method]:
    """The full cache, each policy with the memory and the verification, and what is measured by mask."""
    from ..engine.retention import RetentionConfig
    from ..evals.answering import BY_MASK, FULL, Method
    from ..evals.headwise import headwise
    from ..policies import resolve_policy

    retention = RetentionConfig(memory, verify, refresh)
    options = {} if memory == "drop" else asdict(retention)
    given = {name: x for name, x in options.items() if x not in ("drop", None, "token")}
    added = "".join(f", {name} {x}" for name, x in given.items())
    methods = [Method(FULL)]
    for text in dict.fromkeys(policies or []):
        chosen = resolve_policy(policy=text)
        retention.require_policy(chosen)
        methods.append(Method(f"{chosen}{added}", chosen, options))
    masked = (headwise(text) for text in dict.fromkeys(by_mask or []))
    return [*methods, *(Method(f"{method}{BY_MASK}", method) for method in masked)]


def settings_of(setting: str) -> list[str]:
    from ..evals.answering import SETTINGS

    known("--setting", [setting], [*SETTINGS, "both"])
    return list(SETTINGS) if setting == "both" else [setting]


def known(option: str, given: Sequence[str], names: Sequence[str]) -> list[str]:
    """What was given, each once; SnapKVError if it is none of the names."""
    for name in given:
        if name not in names:
            raise SnapKVError(
                f"{option} must be {', '.join(names[:-1])} or {names[-1]}, got {name!r}"
            )
    return list(dict.fromkeys(given))
