"""Code shared by the evaluation commands: options, methods to measure, and result files."""

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

    Run = Callable[[Results, Callable[[], None]], list[Record]]

VERSION = {"mlx-snapkv": __version__}


class ResultFiles:
    """Result files with a common name and different suffixes, in an existing folder.

    Args:
        name: name without suffix, as typed by the user.
        suffixes: one per file, such as ".jsonl".

    Raises: SnapKVError: a file can't be written, or exists and was not written by this package.
    """

    def __init__(self, name: str, suffixes: Sequence[str]):
        """Check that all files can be written, so that mistakes are reported before anything is measured."""
        if not Path(name).name or name.endswith(os.sep):
            raise SnapKVError(f"--output {name!r} is a folder: add a name for the files")
        self.base = path_of(name, "--output")
        paths = [self.path(suffix) for suffix in suffixes]
        with refusing(f"--output {name}"):
            for path in paths:
                _require_replaceable(path)
            self._earlier_files = [path for path in paths if path.exists()]

    def path(self, suffix: str) -> Path:
        """Return the path of the file with a suffix such as ".jsonl"."""
        return self.base.with_name(self.base.name + suffix)

    def summary(self, written_files: Iterable[Path]) -> str:
        """List the new files on one line, and the replaced files on another."""
        new_files: list[str] = []
        replaced_files: list[str] = []
        for path in written_files:
            if path in self._earlier_files:
                replaced_files.append(str(path))
            else:
                new_files.append(str(path))
        lines = []
        if new_files:
            lines.append(f"wrote {' '.join(new_files)}")
        if replaced_files:
            lines.append(f"replaced {' '.join(replaced_files)}")
        return "\n".join(lines)


def page_to_write(name: str | None, *suffixes: str) -> Path | None:
    """Return the path of a single-file --output, or None without the option.

    Raises: SnapKVError: the path has none of the `suffixes`, the file can't be written or was not written by this
        package, or a picture was requested and matplotlib is missing.
    """
    if name is None:
        return None
    if Path(name).suffix not in suffixes:
        raise SnapKVError(f"--output must end in {' or '.join(suffixes)}, got {name!r}")
    return ResultFiles(name, [""]).base  # `name` already has its suffix


def _require_replaceable(path: Path) -> None:
    """Check that a result can be written to `path`, and that it replaces only an earlier result.

    Raises: SnapKVError: the file can't be written, or exists and was not written by this package, or a picture was
        requested and matplotlib is missing.
    """
    if path.suffix == ".png":
        require_matplotlib()
    file_exists = require_place(path)
    if file_exists and not is_ours(path):
        raise SnapKVError(f"--output: mlx-snapkv did not write {path}: give another name")


def provenance(program: str = "mlx-snapkv") -> dict[str, Any]:
    """Return how and where a result was measured: `program`'s command line, versions, commit and machine."""
    from ..measure.environment import versions_and_machine

    command_line = [*program.split(), *sys.argv[1:]]
    return {"command": shlex.join(command_line), **versions_and_machine()}


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

    program: ClassVar[str] = "mlx-snapkv"  # start of the recorded command line

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
        shared_fields: dict[str, Any],
        n_documents: int,
        run: Run,
        page: Page,
    ) -> None:
        """Measure the records missing from the files, then print and write the result.

        Args:
            files: result files. With None, the result is only printed.
            shared_fields: measurement settings. Files with different settings are rejected.
            n_documents: number of documents that `run` measures.
            run: returns all records, given the results so far and a callback to call after each document.
            page: builds tables from the records.

        Raises: SnapKVError: the files contain records with different settings or from a different version.
        """
        from ..measure.records import Results
        from .progress import StepBars

        records_file = None if files is None else files.path(".jsonl")
        results = Results({**shared_fields, **VERSION}, records_file)
        with results, StepBars(records_file) as bars:
            bars.start("documents", n_documents)
            records = run(results, bars.count_step)
        result = {
            **provenance(self.program),
            **shared_fields,
            **VERSION,
            "summary": page.summarise(records),
            "records": records,
        }
        self._print_and_write(files, result, page)

    def _print_and_write(
        self, files: ResultFiles | None, result: dict[str, Any], page: Page
    ) -> None:
        """Print a result to stdout, and write it to the result files, if any."""
        if self.as_json:
            print(json.dumps(result))
        else:
            for table in page.tables(result["summary"]):
                print_table(table)
        if files is not None:
            written_files = write_result(files.base, result, page.markdown(result))
            # Stdout contains only the JSON object if --json is set.
            stream = sys.stderr if self.as_json else sys.stdout
            print(files.summary(written_files), file=stream)


def methods_to_measure(
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
        lengths: lengths of the prompts to measure, in tokens, if known.
        store: store options for sparse attention.

    Raises: SnapKVError: a value can't be parsed, a store is set without sparse attention, or a method would compress
        none of the prompts.
    """
    from ..measure.methods import Method, require_compression

    store = store or StoreOptions()
    policy_settings = parse_settings(policies)
    if not sparse:
        for setting in policy_settings:
            store.require_sparse(setting)
    sparse_settings = [store.apply_to(setting) for setting in parse_settings(None, sparse=sparse)]
    unique_settings = dict.fromkeys([*policy_settings, *sparse_settings])
    full_cache = Method()
    methods = [full_cache, *(Method(setting) for setting in unique_settings)]
    require_compression(methods, lengths)
    return methods
