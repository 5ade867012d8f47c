"""Questions whose right answers are known, asked with the full cache and with policies side by side.

    python scripts/evaluate.py needle --length 2048,4096 --policy keydiff:budget=12.5%
    python scripts/evaluate.py COMMAND --help

scripts/evaluation/README.md says what each command measures.
"""

from typing import Any

import typer
from evaluation.commands import data, needle, suite

from mlx_snapkv.cli.app import main
from mlx_snapkv.cli.command import Command, with_options


class ScriptCommand(Command):
    """A command that ignores variables and config.toml, so that a measurement is the same on every machine."""

    def config_values(self, ctx: Any) -> dict[str, Any]:
        """Return no values."""
        return {}


app = typer.Typer(help=__doc__.splitlines()[0], add_completion=False, rich_markup_mode=None)
for function in (needle, suite, data):
    app.command(cls=ScriptCommand)(with_options(function))

if __name__ == "__main__":
    main(app)
