"""The results of measurements: their tables on the terminal, and their files."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SnapKVError
from ..paths import path_of, put_result, refusing, require_place
from ..reporting import files

if TYPE_CHECKING:
    from ..reporting.table import Table

NAMES = ("cache", "server", "policy", "method", "task")  # columns of names; all others hold figures
LONG = 24  # characters of a heading, which are then folded
LEAST_WIDTH = 108  # characters; narrower terminals wrap lines, but no figure is cut


class ResultFiles:
    """The files of a result: NAME and an ending each, in a folder that is made if it is not there.

    Args:
        name: what the user gave for `--output`.
        endings: of all files that will be written.

    Raises:
        SnapKVError: one can't be written, or is there and not by this package.
    """

    def __init__(self, name: str, endings: Sequence[str]):
        if any(ending.endswith(".png") for ending in endings):
            files.require_matplotlib()
        if not Path(name).name or name.endswith(os.sep):
            raise SnapKVError(f"--output {name!r} names a folder: add a name for the files")
        self.base = path_of(name, "--output")
        folder = self.base.parent
        with refusing(f"--output {name}"):
            if folder.exists() and not folder.is_dir():
                raise SnapKVError(f"--output {name}: {folder} is a file, and no folder")
            folder.mkdir(parents=True, exist_ok=True)
            self._replaced = [p for p in map(self.path, endings) if require_place(p)]
            foreign = [path for path in self._replaced if not files.is_ours(path)]
        if foreign:
            raise SnapKVError(
                f"--output {name}: {foreign[0]} is there already, and mlx-snapkv did not write it: "
                "give another name"
            )

    def path(self, ending: str) -> Path:
        """The file with this ending."""
        return with_suffix(self.base, ending)

    def summary(self, written: Iterable[Path]) -> str:
        """What was written and what that replaced, in a line each."""
        there = {path: path in self._replaced for path in written}
        ways = {"wrote": False, "replaced": True}
        lines = [[way, *(str(p) for p in there if there[p] is old)] for way, old in ways.items()]
        return "\n".join(" ".join(line) for line in lines if len(line) > 1)


def require_page(name: str, endings: Sequence[str]) -> Path:
    """Where to write; SnapKVError if nothing can be, or it is not ours to replace."""
    path = Path(name)
    if path.suffix not in endings:
        raise SnapKVError(f"--output must end in {' or '.join(endings)}, got {name!r}")
    if path.suffix == ".png":
        files.require_matplotlib()
    if require_place(path) and not files.is_ours(path):
        raise SnapKVError(
            f"--output {path} is there already, and mlx-snapkv did not write it: give another name"
        )
    return path


def about() -> dict[str, Any]:
    """How and where a result was measured: the command, versions, commit and machine."""
    from ..reporting.setting import setting

    return {"command": shlex.join(["mlx-snapkv", *sys.argv[1:]]), **setting()}


def write_json(base: Path, result: Any) -> Path:
    """Write a result to `base`.json; that path."""
    path = with_suffix(base, ".json")
    put_result(path, json.dumps(result, indent=1) + "\n")
    return path


def write_result(base: Path, result: Any, page: str) -> list[Path]:
    """Write a result to `base`.json and its page to `base`.md; their paths."""
    path = with_suffix(base, ".md")
    put_result(path, page)
    return [write_json(base, result), path]


def with_suffix(base: Path, suffix: str) -> Path:
    """`base` and a suffix, whatever dots its name has."""
    return base.with_name(base.name + suffix)


def print_table(made: Table) -> None:
    """Print a table with its title and its remark, names to the left and figures to the right."""
    from rich import box
    from rich import table as rich_table
    from rich.console import Console

    console = Console()
    console.width = max(console.width, LEAST_WIDTH)
    looks: Any = {"title_justify": "left", "box": box.SIMPLE, "padding": (0, 1, 0, 0)}
    drawn = rich_table.Table(title=made.title, **looks)
    for column in made.columns:
        fold = column in NAMES or len(column) > LONG
        figures: Any = {"justify": "right", "no_wrap": not fold, "min_width": 8 * fold}
        drawn.add_column(column, overflow="fold", **({} if column in NAMES else figures))
    for row in made.rows:
        drawn.add_row(*row)
    console.print(drawn, made.remark, sep="\n", markup=False)
