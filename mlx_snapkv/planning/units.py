"""Format numbers of bytes."""


def format_bytes(n: float) -> str:
    """Return bytes in decimal units, like mlx-lm: 1,234,567 is "1.23 MB"."""
    for unit in ("B", "kB", "MB"):
        if n < 1000:
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} GB"
