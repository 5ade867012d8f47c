"""Formats byte counts."""


def format_bytes(n: float) -> str:
    """Format bytes in decimal units, like mlx-lm: 1,234,567 becomes "1.23 MB"."""
    for unit in ("B", "kB", "MB"):
        if n < 1000:
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} GB"
