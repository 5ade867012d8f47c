"""The command's entry point: its sub-commands, and one line for every mistake."""

import errno
import os
import re
import sys
import warnings
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
from .command import Command, in_flags, with_options
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

INTERRUPTED = 130  # exit code

app = typer.Typer(
    help="Long prompts with mlx-lm, faster or in less memory. --snapkv evicts entries: it saves memory, and time per "
    "token of the answer. --sparse keeps all entries and reads few: it saves time to the first token, and per token.",
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


EVALUATIONS = "Measure on your own texts how far a model's predictions move."
evaluations = typer.Typer(help=EVALUATIONS, callback=_help, invoke_without_command=True)
COMMANDS = (
    generate, chat, compare, batch, serve, cache_prompt, inspect, plan, demo, models, policies, config, bench, doctor,
)  # fmt: skip
for group, commands in ((app, COMMANDS), (evaluations, (fidelity,))):
    for function in commands:
        name = function.__name__.replace("_", "-")
        first, *_ = (function.__doc__ or "").split("\n\n")
        group.command(name, cls=Command, short_help=first)(with_options(function))
app.add_typer(evaluations, name="eval", short_help=EVALUATIONS)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(__version__)
    else:
        _help(context)


def main(commands: typer.Typer = app) -> None:
    """Run the command; a user's mistake is one line on stderr and exit code 2, a full disk 1."""
    process.hold_standard_descriptors()
    process.allow_many_files()
    warnings.simplefilter("ignore", TrainedLengthWarning)  # commands say it themselves, in one line
    if not isinstance(sys.stderr, process.Stderr):
        sys.stderr = process.Stderr(sys.stderr)  # type: ignore[assignment]
    if sys.stdout is None:
        fail("standard output is closed, so the answer can't be written", status=1)
    folder = os.environ.get("TMPDIR")
    if folder and not os.path.isdir(folder):  # which MLX would fail on
        fail(f"TMPDIR must be a folder, got {folder}")
    try:
        status = commands(standalone_mode=False)
        if status == INTERRUPTED:  # what typer makes of Ctrl-C
            raise KeyboardInterrupt
        sys.stdout.flush()
    except SnapKVError as error:
        fail(in_flags(error), status=1 if _is_of_full_disk(error) else 2)
    except (KeyboardInterrupt, typer.Abort):
        print("\nmlx-snapkv: stopped", file=sys.stderr)
        process.leave(INTERRUPTED)
    except BrokenPipeError:
        os._exit(1)  # the usual exit would try to write the rest
    except OSError as error:  # a full disk; no mistake of the command's
        named = f"{error.filename}: " if error.filename else ""
        fail(named + (error.strerror or str(error)), status=1)
    except ImportError as error:
        if (failure := _of_mlx(error)) is None:
            raise
        fail(failure, status=1)
    except Exception as error:
        # Newer typers bring a click of their own, so its usage errors are known by what they can do.
        if hasattr(error, "format_message"):
            fail(error.format_message())
        process.speak()
        raise
    else:
        process.leave(status if isinstance(status, int) else 0)


def _of_mlx(error: ImportError) -> str | None:
    """What to do about MLX, if that is what can't be imported."""
    named = f"{error.name} {error.path}".split()
    if not any(re.search(r"(^|[/.])mlx([/.]|$)", each) for each in named):
        return None
    return complaint_here(mlx_error=brief(error))


def _is_of_full_disk(error: BaseException | None) -> bool:
    """Whether a full disk is behind an error: no mistake of the command's."""
    full = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
    while error is not None and getattr(error, "errno", None) not in full:
        error = error.__cause__
    return error is not None


def fail(message: str, status: int = 2) -> NoReturn:
    """Print one line on stderr and exit."""
    process.speak()
    print(f"mlx-snapkv: {' '.join(message.split())}", file=sys.stderr)
    process.leave(status)
