"""Where the command starts, `mlx-snapkv` or `python -m mlx_snapkv`."""

import sys


def main() -> None:
    try:
        from .cli.app import main
    except KeyboardInterrupt:
        print("\nmlx-snapkv: stopped", file=sys.stderr)
        sys.exit(130)
    main()


if __name__ == "__main__":
    main()
