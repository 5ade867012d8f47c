"""Texts longer than a tokenizer was made for; it imports nothing slow."""


def take_any_length(tokenizer) -> None:
    """Have transformers not say that texts beyond the tokenizer's own limit fail: here they don't."""
    noted = getattr(tokenizer, "deprecation_warnings", None)  # what it says once, and has said
    if isinstance(noted, dict):
        noted["sequence-length-is-longer-than-the-specified-maximum"] = True
