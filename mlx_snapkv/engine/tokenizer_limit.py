"""Ignore the maximum length of a tokenizer, which is no limit here. This file imports nothing slow."""


def ignore_length_limit(tokenizer) -> None:
    """Silence transformers' warning about texts longer than the tokenizer's limit, because they do not fail here."""
    # Names of warnings that are given once.
    given_warnings = getattr(tokenizer, "deprecation_warnings", None)
    if isinstance(given_warnings, dict):
        given_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
