"""Texts longer than a tokenizer was made for; it imports nothing slow."""


def take_any_length(tokenizer) -> None:
    """Silence transformers' warning about texts longer than the tokenizer's limit: here they don't fail."""
    noted = getattr(tokenizer, "deprecation_warnings", None)  # what it says once, and has said
    if isinstance(noted, dict):
        noted["sequence-length-is-longer-than-the-specified-maximum"] = True
