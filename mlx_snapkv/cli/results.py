"""Options, methods and result files that evaluations share."""

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
from ..measure.tables import is_ours, require_matplotlib
from ..paths import path_of, put_result, refusing, require_place
from .cache_options import StoreOptions, parse_settings
from .options import AsJson
from .terminal_table import print_table

if TYPE_CHECKING:
    from ..measure.methods import Method
    from ..measure.records import Record, Results
    from ..measure.tables import Page

    Run = Callable[[Results, Callable[..., None]], list[Record]]

VERSION = {"mlx-snapkv": __version__}


class ResultFiles:
    """Result files with a common name and different suffixes, in an existing folder.

    Args:
        name: name without suffix, as typed by the user.
        endings: suffixes such as ".jsonl".

    Raises: SnapKVError: a file can't be written, or exists and was not written by this package.
    """

    def __init__(self, name: str, endings: Sequence[str]):
        """Check that all files can be written before anything is measured."""
        if not Path(name).name or name.endswith(os.sep):
            raise SnapKVError(f"--output {name!r} is a folder: add a name for the files")
        self.base = path_of(name, "--output")
        paths = [self.path(ending) for ending in endings]
        with refusing(f"--output {name}"):
            self._replaced = [path for path in paths if _is_replaced(path)]

    def path(self, ending: str) -> Path:
        """Return the path of the file with a suffix such as ".jsonl"."""
        return self.base.with_name(self.base.name + ending)

    def summary(self, written: Iterable[Path]) -> str:
        """List the new files on one line, and the replaced files on another."""
        new: list[Path] = []
        replaced: list[Path] = []
        for path in written:
            group = replaced if path in self._replaced else new
            group.append(path)
        lines = []
        if new:
            lines.append(f"wrote {' '.join(map(str, new))}")
        if replaced:
            lines.append(f"replaced {' '.join(map(str, replaced))}")
        return "\n".join(lines)


def require_page(name: str | None, *endings: str) -> Path | None:
    """Return the path of a single-file --output, or None without the option.

    Raises: SnapKVError: the path has another suffix, can't be written, or is a file that this package did not write.
    """
    if name is None:
        return None
    if Path(name).suffix not in endings:
        raise SnapKVError(f"--output must end in {' or '.join(endings)}, got {name!r}")
    return ResultFiles(name, [""]).base


def _is_replaced(path: Path) -> bool:
    """Return whether writing a result would replace an existing file.

    Raises: SnapKVError: the file can't be written, or was not written by this package.
    """
    if path.suffix == ".png":
        require_matplotlib()
    exists = require_place(path)
    if exists and not is_ours(path):
        raise SnapKVError(f"--output: mlx-snapkv did not write {path}: give another name")
    return exists


def provenance(program: str = "mlx-snapkv") -> dict[str, Any]:
    """Return how and where a result was measured: `program`'s command line, versions, commit and machine."""
    from ..measure.environment import setting

    return {"command": shlex.join([*program.split(), *sys.argv[1:]]), **setting()}


def write_json(base: Path, result: Any) -> Path:
    """Write a result to `base`.json and return the path."""
    path = base.with_name(f"{base.name}.json")
    put_result(path, json.dumps(result, indent=1) + "\n")
    return path


def write_result(base: Path, result: Any, page: str) -> list[Path]:
    """Write a result to `base`.json and its page to `base`.md, and return both paths."""
    page_path = base.with_name(f"{base.name}.md")
    put_result(page_path, page)
    return [write_json(base, result), page_path]


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
    """Options for where a result is printed and written."""

    program: ClassVar[str] = "mlx-snapkv"  # start of the command line in the result

    output: Annotated[
        str | None,
        Option(
            help="Write results to OUTPUT.jsonl as they come, or continue from it if it exists; at the end write "
            "OUTPUT.json and OUTPUT.md."
        ),
    ] = None
    as_json: AsJson = False

    def files(self) -> ResultFiles | None:
        """Return the result files, or None without --output. Raises: SnapKVError: see `ResultFiles`."""
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
        """Measure the records missing from the files, then print and write the result.

        Args:
            files: result files; None only prints the result.
            fixed: settings of the measurement. Files with other settings are rejected.
            n_documents: number of documents that `run` measures.
            run: returns all records, given the results so far and a callback for each finished document.
            page: builds tables from the records.

        Raises: SnapKVError: the files contain records with other settings or of another version.
        """
        from ..measure.records import Results
        from .progress import StepBars

        records_file = None if files is None else files.path(".jsonl")
        results = Results({**fixed, **VERSION}, records_file)
        with results, StepBars(records_file) as bars:
            bars.start("documents", n_documents)
            records = run(results, bars.done)
        result = {
            **provenance(self.program),
            **fixed,
            **VERSION,
            "summary": page.summarise(records),
            "records": records,
        }
        if self.as_json:
            print(json.dumps(result))
        else:
            for table in page.tables(result["summary"]):
                print_table(table)
        if files is not None:
            written = write_result(files.base, result, page.markdown(result))
            # Stdout contains only the JSON object if --json is set.
            print(files.summary(written), file=sys.stderr if self.as_json else sys.stdout)


def methods_of(
    policies: Sequence[str] | None,
    sparse: Sequence[str] | None = None,
    *,
    lengths: Sequence[int] = (),
    store: StoreOptions | None = None,
) -> list[Method]:
    """Return the methods to measure: the full cache, each policy and each sparse attention setting.

    Args:
        policies: values of --policy; duplicates are dropped.
        sparse: values of --sparse; duplicates are dropped.
        lengths: prompt lengths to measure, in tokens.
        store: store options for sparse attention.

    Raises: SnapKVError: a value can't be parsed, a store is set but no sparse attention is measured, or a method would
        not compress any prompt.
    """
    from ..measure.methods import Method, require_compression

    store = store or StoreOptions()
    settings: list[Any] = parse_settings(policies)
    if not sparse:
        settings = [store.folded_into(setting) for setting in settings]  # rejects a store
    settings += [store.folded_into(setting) for setting in parse_settings(None, sparse=sparse)]
    full_cache = Method()
    methods = [full_cache, *map(Method, dict.fromkeys(settings))]
    require_compression(methods, lengths)
    return methods
