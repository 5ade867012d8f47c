"""Where the command starts, `mlx-snapkv` or `python -m mlx_snapkv`; it must be readable by Python 3.9."""

from .prerequisites import require


def main() -> None:
    require()
    from .cli.process import stop_at_once

    stop_at_once()
    from .cli.app import main

    main()


if __name__ == "__main__":
    main()
