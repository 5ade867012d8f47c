"""Where the command starts, `mlx-snapkv` or `python -m mlx_snapkv`."""

from .cli.process import stop_at_once


def main() -> None:
    stop_at_once()
    from .cli.app import main

    main()


if __name__ == "__main__":
    main()
