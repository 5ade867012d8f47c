"""The command's entry point: its sub-commands, and one line for every mistake."""

import os
import sys
from typing import Annotated

import typer

from .._version import __version__
from ..errors import SnapKVError
from . import bench, cache_prompt, chat, demo, evaluate, generate, models, policies

app = typer.Typer(
    help="KV-cache compression for mlx-lm: long prompts, small caches, the same answers.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("cache-prompt")(cache_prompt.cache_prompt)
app.command("demo")(demo.demo)
app.command("models")(models.models)
app.command("policies")(policies.policies)
app.command("bench")(bench.bench)
app.add_typer(evaluate.app, name="eval")


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(__version__)
    elif context.invoked_subcommand is None:
        print(context.get_help())


def main() -> None:
    """Run the command; a user's mistake is one line on stderr and exit code 2."""
    _require_temporary_folder()
    try:
        status = app(standalone_mode=False)
    except SnapKVError as error:
        fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        print("\nmlx-snapkv: stopped", file=sys.stderr)
        sys.exit(130)
    except OSError as error:  # a full disk or a reader that has gone; no mistake of the command's
        print(f"mlx-snapkv: {error.strerror or error}", file=sys.stderr)
        os._exit(1)  # the usual exit would try to write the rest
    except Exception as error:
        # Newer typers bring a click of their own, so its usage errors are told by what they can do.
        if not hasattr(error, "format_message"):
            raise
        fail(error.format_message())
    else:
        sys.exit(status if isinstance(status, int) else 0)


def _require_temporary_folder() -> None:
    """MLX looks for it when it is first used, and takes it amiss."""
    folder = os.environ.get("TMPDIR")
    if folder and not os.path.isdir(folder):
        fail(f"TMPDIR names no folder: {folder}")


def fail(message: str) -> None:
    print(f"mlx-snapkv: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)
