"""What is not worth keeping apart: the end of a prompt, where all that stands before it is kept for another."""

SHARE = 16  # one token in so many may have to be read again


def is_tail(n_common: int, n: int) -> bool:
    """Whether of `n` tokens, those after the first `n_common` are soon read again."""
    return n - n_common <= n // SHARE
