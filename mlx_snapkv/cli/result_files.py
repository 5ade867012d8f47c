"""The files of a result."""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..errors import SnapKVError
from ..paths import path_of, put_result, reason, require_place
from ..reporting import files


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
        try:
            if folder.exists() and not folder.is_dir():
                raise SnapKVError(f"--output {name}: {folder} is a file, and no folder")
            folder.mkdir(parents=True, exist_ok=True)
            paths = [self.path(ending) for ending in endings]
            self._replaced = [path for path in paths if require_place(path)]
            foreign = [path for path in self._replaced if not files.is_ours(path)]
        except (OSError, ValueError) as error:
            raise SnapKVError(f"--output {name}: {reason(error)}") from error
        if foreign:
            raise SnapKVError(
                f"--output {name}: {foreign[0]} is there already, and mlx-snapkv did not write it: "
                "give another name"
            )

    def path(self, ending: str) -> Path:
        """The file with this ending."""
        return with_suffix(self.base, ending)

    def told(self, written: Iterable[Path]) -> str:
        """What was written and what that replaced, in a line each."""
        there = {path: path in self._replaced for path in written}
        ways = {"wrote": False, "replaced": True}
        lines = [[way, *(str(p) for p in there if there[p] is old)] for way, old in ways.items()]
        return "\n".join(" ".join(line) for line in lines if len(line) > 1)


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
