"""Formats byte counts."""


def format_bytes(n_bytes: float) -> str:
    """Format bytes in decimal units, like mlx-lm: 1,234,567 becomes "1.23 MB"."""
    amount = n_bytes
    for unit in ("B", "kB", "MB"):
        if amount < 1000:
            return f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:.3g} GB"
