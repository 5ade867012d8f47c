"""The length that a tokenizer was made for, which is no limit here; this file imports nothing slow."""


def ignore_length_limit(tokenizer) -> None:
    """Silence transformers' warning about texts longer than the tokenizer's limit: here they don't fail."""
    noted = getattr(tokenizer, "deprecation_warnings", None)  # warnings given once
    if isinstance(noted, dict):
        noted["sequence-length-is-longer-than-the-specified-maximum"] = True
