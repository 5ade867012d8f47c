"""What the evaluations share: their options, and the way from records to tables and files."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from ..errors import SnapKVError
from .options import AsJson
from .result_files import ResultFiles, write_result

if TYPE_CHECKING:
    from ..evals.answering import Method
    from ..reporting.table import Table

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

    def finish(
        self,
        files: ResultFiles | None,
        result: dict[str, Any],
        tables: Iterable[Table],
        page: str,
        pictures: Sequence[Path] = (),
    ) -> None:
        """Print the tables or a JSON object, and write the result with its page."""
        from .print_table import print_table

        if self.as_json:
            print(json.dumps(result))
        else:
            for table in tables:
                print_table(table)
        if files is not None:
            written = [*write_result(files.base, result, page), *pictures]
            print(files.told(written), file=sys.stderr if self.as_json else sys.stdout)


def result_of(
    fixed: dict[str, Any], summary: list[dict[str, Any]], records: list[dict[str, Any]]
) -> dict[str, Any]:
    """A result as it is written: the command and the machine, what was fixed, and what was found."""
    from ..reporting.setting import setting

    command = shlex.join(["mlx-snapkv", *sys.argv[1:]])
    return {"command": command, **fixed, **setting(), "summary": summary, "records": records}


def methods_of(
    policies: Sequence[str] | None,
    memory: str = "drop",
    verify: str | None = None,
    refresh: str = "token",
    by_mask: Sequence[str] | None = None,
) -> list[Method]:
    """The full cache, each policy with the memory and the verification, and what is measured by mask."""
    from ..engine.recalling import Recall
    from ..evals.answering import BY_MASK, FULL, Method
    from ..evals.headwise import headwise
    from ..policies import resolve_policy

    recall = Recall(memory, verify, refresh)
    options = {} if memory == "drop" else asdict(recall)
    said = {name: x for name, x in options.items() if x not in ("drop", None, "token")}
    added = "".join(f", {name} {x}" for name, x in said.items())
    methods = [Method(FULL)]
    for text in dict.fromkeys(policies or []):
        chosen = resolve_policy(policy=text)
        recall.require(chosen)
        methods.append(Method(f"{chosen}{added}", chosen, options))
    masked = (headwise(text) for text in dict.fromkeys(by_mask or []))
    return [*methods, *(Method(f"{method}{BY_MASK}", method) for method in masked)]


def settings_of(setting: str) -> list[str]:
    from ..evals.answering import SETTINGS

    both = [*SETTINGS, "both"]
    return list(SETTINGS) if setting == "both" else known("--setting", [setting], both)


def known(option: str, given: Sequence[str], names: Sequence[str]) -> list[str]:
    """What was given, each once; SnapKVError if it is none of the names."""
    for name in given:
        if name not in names:
            raise SnapKVError(
                f"{option} must be {', '.join(names[:-1])} or {names[-1]}, got {name!r}"
            )
    return list(dict.fromkeys(given))
