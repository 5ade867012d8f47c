"""Options for the result of an evaluation."""

from dataclasses import dataclass
from typing import ClassVar

from mlx_snapkv.cli.results import ResultOptions

PROGRAM = "python scripts/evaluate.py"


@dataclass(frozen=True)
class ScoreOptions(ResultOptions):
    """The options of the package's commands; the result shows the command line of the script."""

    program: ClassVar[str] = PROGRAM
