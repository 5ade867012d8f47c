"""Options for an evaluation's result."""

from dataclasses import dataclass
from typing import ClassVar

from mlx_snapkv.cli.results import ResultOptions

PROGRAM = "python scripts/evaluate.py"


@dataclass(frozen=True)
class ScoreOptions(ResultOptions):
    """The package's result options, with the script's command line in the result."""

    program: ClassVar[str] = PROGRAM
