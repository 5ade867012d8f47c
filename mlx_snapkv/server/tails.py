"""What is not worth keeping apart: the end of a prompt, where all that stands before it is kept for another."""

SHARE = 16  # one token in so many may have to be read again


def n_without_tail(n: int) -> int:
    """Of a prompt's `n` tokens, those that are not soon read again."""
    return n - n // SHARE


def is_tail(n_common: int, n: int) -> bool:
    """Whether those after the first `n_common` are."""
    return n_common >= n_without_tail(n)
