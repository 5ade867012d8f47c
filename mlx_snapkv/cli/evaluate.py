"""`mlx-snapkv eval`: what is still answered when the cache is compressed."""

from __future__ import annotations

import typer

from .command import Command
from .eval_data import data
from .eval_fidelity import fidelity
from .eval_lm import lm
from .eval_needle import lines, needle
from .eval_suite import suite

app = typer.Typer(help="Ask about long documents, with the full cache and with policies.")

for command in (fidelity, data, lm, needle, lines, suite):
    app.command(command.__name__, cls=Command)(command)


@app.callback(invoke_without_command=True)
def root(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())
