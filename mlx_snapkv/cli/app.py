"""Entry point of the `mlx-snapkv` command line: registers the commands and reports errors as one line on stderr."""

import errno
import os
import re
import sys
import warnings
from inspect import cleandoc
from typing import Annotated, NoReturn

import typer

from .._version import __version__
from ..errors import SnapKVError, TrainedLengthWarning, brief
from ..prerequisites import complaint_here
from . import process
from .batch import batch
from .bench import bench
from .cache_prompt import cache_prompt
from .chat import chat
from .command import Command, message_with_flags, with_options
from .compare import compare
from .config import config
from .demo import demo
from .doctor import doctor
from .eval_fidelity import fidelity
from .generate import generate
from .inspecting import inspect
from .listings import models, policies
from .plan import plan
from .serve import serve

INTERRUPTED = 130  # exit status after Ctrl-C
HELP_WIDTH = 100  # columns, on terminals that are wide enough

app = typer.Typer(
    help="Long prompts with mlx-lm, faster or in less memory. --snapkv evicts entries: it saves memory, and time per "
    "token of the answer. --sparse keeps all entries, and its answers read few of them, while that is faster.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": HELP_WIDTH},
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_help(context: typer.Context) -> None:
    """Print a command group's help if no subcommand was given."""
    if context.invoked_subcommand is None:
        print(context.get_help())


EVALUATIONS = "Measure on your own texts how far a model's predictions move."
evaluations = typer.Typer(help=EVALUATIONS, callback=_print_help, invoke_without_command=True)
COMMANDS = (
    generate, chat, compare, batch, serve, cache_prompt, inspect, plan, demo, models, policies, config, bench, doctor,
)  # fmt: skip
for group, commands in ((app, COMMANDS), (evaluations, (fidelity,))):
    for function in commands:
        # A backspace character keeps typer from rewrapping the lines after it. The raw docstrings contain a backslash
        # and a "b" in its place.
        text = cleandoc(function.__doc__ or "").replace("\\b\n", "\b\n")
        summary, *_ = text.split("\n\n")
        command = with_options(function)
        group.command(cls=Command, help=text, short_help=summary)(command)
app.add_typer(evaluations, name="eval", short_help=EVALUATIONS)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Print the version with --version, or the help if no command was given."""
    if version:
        print(__version__)
    else:
        _print_help(context)


def main(commands: typer.Typer = app) -> None:
    """Run the command line and exit.

    User errors exit with status 2, system errors such as a full disk with 1, and Ctrl-C with 130. Each prints one line
    on stderr. A closed output pipe exits with 1 and prints nothing. A bug in the program prints a traceback.
    """
    process.open_standard_descriptors()
    process.allow_many_files()
    process.replace_unencodable_characters()
    warnings.simplefilter("ignore", TrainedLengthWarning)  # commands print their own warning
    if not isinstance(sys.stderr, process.Stderr):
        sys.stderr = process.Stderr(sys.stderr)  # type: ignore[assignment]
    if sys.stdout is None:
        fail("standard output is closed, so the answer can't be written", status=1)
    temporary_folder = os.environ.get("TMPDIR")
    if temporary_folder and not os.path.isdir(temporary_folder):
        # MLX fails without explanation if this folder does not exist.
        fail(f"TMPDIR must be a folder, got {temporary_folder}")
    try:
        status = commands(standalone_mode=False)
        if status == INTERRUPTED:  # typer returns this after Ctrl-C
            raise KeyboardInterrupt
        sys.stdout.flush()
    except SnapKVError as error:
        fail(message_with_flags(error), status=1 if _is_full_disk(error) else 2)
    except (KeyboardInterrupt, typer.Abort):
        print("\nmlx-snapkv: stopped", file=sys.stderr)
        process.exit_process(INTERRUPTED)
    except BrokenPipeError:
        os._exit(1)  # sys.exit would try to write the remaining output
    except OSError as error:
        prefix = f"{error.filename}: " if error.filename else ""
        fail(prefix + (error.strerror or str(error)), status=1)
    except ImportError as error:
        advice = _mlx_advice(error)
        if advice is None:
            raise
        fail(advice, status=1)
    except Exception as error:
        # Newer versions of typer contain a copy of click, so the class of usage errors depends on the version.
        # Recognise usage errors by their `format_message` method instead.
        if hasattr(error, "format_message"):
            fail(error.format_message())
        process.restore_stderr()
        raise
    else:
        process.exit_process(status if isinstance(status, int) else 0)


def _mlx_advice(error: ImportError) -> str | None:
    """Explain why MLX can't be imported. Return None if another module failed to import."""
    # Matches "mlx" as a component of a module name or path, e.g. "mlx.core" or "/lib/mlx/core.so".
    mlx_component = re.compile(r"(^|[/.])mlx([/.]|$)")
    module_and_path = f"{error.name} {error.path}".split()
    is_about_mlx = any(mlx_component.search(text) for text in module_and_path)
    return complaint_here(mlx_error=brief(error)) if is_about_mlx else None


def _is_full_disk(error: BaseException | None) -> bool:
    """Check whether an error or one of its causes reports a full disk, an exceeded quota or an oversized file."""
    while error is not None:
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            return True
        error = error.__cause__
    return False


def fail(message: str, status: int = 2) -> NoReturn:
    """Print a message as one line on stderr and exit with `status`."""
    process.restore_stderr()
    print(f"mlx-snapkv: {' '.join(message.split())}", file=sys.stderr)
    process.exit_process(status)
