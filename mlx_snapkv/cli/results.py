"""Measurements: what evaluations share, their tables on the terminal, and the files of their results."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from typer import Option

from .._version import __version__
from ..errors import SnapKVError
from ..measure.tables import Table, is_ours, require_matplotlib
from ..paths import path_of, put_result, refusing, require_place
from ..planning.options import RequestOptions
from .cache_options import each_method
from .options import AsJson

if TYPE_CHECKING:
    from ..measure.methods import Method
    from ..measure.records import Record, Results
    from ..measure.tables import Page

    Run = Callable[[Results, Callable[..., None]], list[Record]]

# Columns of words; all others hold figures.
NAME_COLUMNS = (
    "cache",
    "method",
    "task",
    "model type",
    "also loads",
    "note",
    "why",
    "name",
    "here",
)
VERSION = {"mlx-snapkv": __version__}
MAX_HEADING = 24  # characters of a heading, which are then folded
LEAST_WIDTH = 108  # characters; narrower terminals wrap lines, but no figure is cut


class ResultFiles:
    """The files of a result: a name and an ending each, in a folder that is there.

    Raises: SnapKVError: one can't be written, or is there and not by this package.
    """

    def __init__(self, name: str, endings: Sequence[str]):
        if not Path(name).name or name.endswith(os.sep):
            raise SnapKVError(f"--output {name!r} is a folder: add a name for the files")
        self.base = path_of(name, "--output")
        with refusing(f"--output {name}"):
            self._replaced = [p for p in map(self.path, endings) if _is_replaced(p)]

    def path(self, ending: str) -> Path:
        return self.base.with_name(self.base.name + ending)

    def summary(self, written: Iterable[Path]) -> str:
        """What was written and what that replaced, in a line each."""
        lines: dict[str, str] = {"wrote": "", "replaced": ""}
        for path in written:
            lines["replaced" if path in self._replaced else "wrote"] += f" {path}"
        return "\n".join(verb + paths for verb, paths in lines.items() if paths)


def require_page(name: str | None, *endings: str) -> Path | None:
    """Where to write, if anywhere; SnapKVError if nothing can be, or it is not ours to replace."""
    if name is None:
        return None
    if Path(name).suffix not in endings:
        raise SnapKVError(f"--output must end in {' or '.join(endings)}, got {name!r}")
    return ResultFiles(name, [""]).base


def _is_replaced(path: Path) -> bool:
    """Whether a file is there, and ours to replace; SnapKVError if it is not ours, or can't be written."""
    if path.suffix == ".png":
        require_matplotlib()
    is_there = require_place(path)
    if is_there and not is_ours(path):
        raise SnapKVError(f"--output: mlx-snapkv did not write {path}: give another name")
    return is_there


def about(program: str = "mlx-snapkv") -> dict[str, Any]:
    """How and where a result was measured: the command, versions, commit and machine."""
    from ..measure.environment import setting

    return {"command": shlex.join([*program.split(), *sys.argv[1:]]), **setting()}


def write_json(base: Path, result: Any) -> Path:
    """Write a result to `base`.json; that path."""
    path = base.with_name(f"{base.name}.json")
    put_result(path, json.dumps(result, indent=1) + "\n")
    return path


def write_result(base: Path, result: Any, page: str) -> list[Path]:
    """Write a result to `base`.json and its page to `base`.md; their paths."""
    put_result(path := base.with_name(f"{base.name}.md"), page)
    return [write_json(base, result), path]


def print_table(made: Table) -> None:
    """Print a table with its title and its remark, names to the left and figures to the right."""
    from rich import box, table
    from rich.console import Console

    console = Console()
    console.width = max(console.width, LEAST_WIDTH)
    looks: Any = {"title_justify": "left", "box": box.SIMPLE, "padding": (0, 1, 0, 0)}
    drawn = table.Table(title=made.title, **looks)
    for column in made.columns:
        fold = len(column) > MAX_HEADING
        figures: Any = {"justify": "right", "no_wrap": not fold, "min_width": 8 * fold}
        drawn.add_column(column, overflow="fold", **({} if column in NAME_COLUMNS else figures))
    for row in made.rows:
        drawn.add_row(*row)
    console.print(drawn, made.remark, sep="\n", markup=False)


Policies = Annotated[
    list[str] | None,
    Option(
        "--policy",
        help="Policy to measure, such as keydiff:budget=12.5% (a share of the prompt); repeatable.",
    ),
]


Sparses = Annotated[
    list[str] | None,
    Option(
        "--sparse",
        help='Sparse attention to measure, such as budget=6.25% ("" for the defaults); repeatable.',
    ),
]


@dataclass(frozen=True)
class ResultOptions:
    """What becomes of a result: it is printed, and written to files."""

    program: ClassVar[str] = "mlx-snapkv"  # whose command line a result shows

    output: Annotated[
        str | None,
        Option(
            help="Write results to OUTPUT.jsonl as they come, or continue from it if it exists; at the end write "
            "OUTPUT.json and OUTPUT.md."
        ),
    ] = None
    as_json: AsJson = False

    def files(self) -> ResultFiles | None:
        if self.output is None:
            return None
        return ResultFiles(self.output, (".jsonl", ".json", ".md"))

    def measure(
        self,
        files: ResultFiles | None,
        fixed: dict[str, Any],
        n_documents: int,
        run: Run,
        page: Page,
    ) -> None:
        """Measure what the files do not hold yet, with a bar; print the result, and write it.

        Args:
            fixed: what results that go on from each other have in common.
            run: the records, from those there are and a callback for every document.
        """
        from .progress import StepBars

        answers = None if files is None else files.path(".jsonl")
        with results_in(files, fixed) as results, StepBars(answers) as bars:
            bars.start("documents", n_documents)
            records = run(results, bars.done)
        measured = {**VERSION, "summary": page.summarise(records), "records": records}
        result = {**about(self.program), **fixed, **measured}
        if self.as_json:
            print(json.dumps(result))
        else:
            for table in page.tables(result["summary"]):
                print_table(table)
        if files is not None:
            written = write_result(files.base, result, page.markdown(result))
            print(files.summary(written), file=sys.stderr if self.as_json else sys.stdout)


def results_in(files: ResultFiles | None, fixed: dict[str, Any]) -> Results:
    """What the files hold; SnapKVError if they are of another run, or by another version."""
    from ..measure.records import Results

    return Results({**fixed, **VERSION}, None if files is None else files.path(".jsonl"))


def methods_of(
    policies: Sequence[str] | None,
    sparse: Sequence[str] | None = None,
    *,
    lengths: Sequence[int] = (),
    request: RequestOptions | None = None,
) -> list[Method]:
    """The full cache, and each policy and sparse attention, with the same options of a `request` for all.

    Raises: SnapKVError: one can't be read, or would leave prompts of all these lengths as they are.
    """
    from ..measure.methods import Method, require_compression
    from ..planning.config import CompressionConfig
    from ..planning.exclusions import When, require_compatible
    from ..sparse.options import Sparse

    chosen = each_method(dict.fromkeys(policies or []), sparse=dict.fromkeys(sparse or []))
    is_any_sparse = any(isinstance(each, Sparse) for each in chosen)
    options: dict[Any, dict[str, Any]] = {}
    for each in chosen:
        given = (request or RequestOptions()).keywords
        if is_any_sparse and not isinstance(each, Sparse):
            given["store"] = None  # it is for sparse attention
        config = CompressionConfig(each, **given)
        require_compatible(config, When.CHOSEN)
        options[each] = {k: x for k, x in config.keywords.items() if x is not None}
    methods = [Method(), *(Method(each, how) for each, how in options.items())]
    require_compression(methods, lengths)
    return methods
