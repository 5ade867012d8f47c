"""What becomes of an evaluation's results."""

from dataclasses import dataclass
from typing import ClassVar

from mlx_snapkv.cli.results import ResultOptions

PROGRAM = "python scripts/evaluate.py"


@dataclass(frozen=True)
class ScoreOptions(ResultOptions):
    """As for a command of the package; the command line that a result shows is the script's."""

    program: ClassVar[str] = PROGRAM
