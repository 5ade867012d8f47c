"""Entry point for `mlx-snapkv` and `python -m mlx_snapkv`.

This file must run on Python 3.9, so that it can report that Python is too old.
"""

from .prerequisites import require_prerequisites


def main() -> None:
    """Check the prerequisites and run the command-line interface.

    Until a command calls `raise_on_interrupt`, Ctrl-C ends the process at once instead of raising KeyboardInterrupt.
    """
    require_prerequisites()
    from .cli.process import exit_on_interrupt

    exit_on_interrupt()
    from .cli import app

    app.main()


if __name__ == "__main__":
    main()
