"""The command's entry point: its sub-commands, and one line for every mistake."""

from __future__ import annotations

import os
import sys

import click
import typer

from .. import __version__
from ..errors import SnapKVError
from . import demo, generate

app = typer.Typer(
    help="KV-cache compression for mlx-lm: long prompts, small caches, the same answers.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
app.command("generate")(generate.generate)
app.command("demo")(demo.demo)


@app.callback(invoke_without_command=True)
def root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        print(__version__)
        raise typer.Exit()


def main() -> None:
    """Run the command; a user's mistake is one line on stderr and exit code 2."""
    try:
        status = app(standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message())
        sys.exit(2)
    except click.ClickException as error:
        fail(error.format_message())
    except SnapKVError as error:
        fail(str(error))
    except (KeyboardInterrupt, click.Abort):
        print("\nmlx-snapkv: stopped", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output has gone; keep the interpreter from writing to it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    else:
        sys.exit(status if isinstance(status, int) else 0)


def fail(message: str) -> None:
    print(f"mlx-snapkv: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)
