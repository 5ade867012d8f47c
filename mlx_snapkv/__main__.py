"""Run the command line, as `mlx-snapkv` or `python -m mlx_snapkv`; the file must be valid for Python 3.9."""

from .prerequisites import require


def main() -> None:
    """Check what MLX needs of the machine, then run the command line. An interrupt ends the process at once."""
    require()
    from .cli.process import exit_on_interrupt

    exit_on_interrupt()
    from .cli.app import main

    main()


if __name__ == "__main__":
    main()
