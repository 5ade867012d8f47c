"""Turns off the tokenizer's length warning. This is a separate module, so that it imports fast."""


def ignore_length_limit(tokenizer) -> None:
    """Silence transformers' warning about texts longer than the tokenizer's limit.

    That limit does not apply here.
    """
    # transformers records here which warnings it has already shown.
    given_warnings = getattr(tokenizer, "deprecation_warnings", None)
    if isinstance(given_warnings, dict):
        given_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
