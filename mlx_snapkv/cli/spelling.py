"""Options as they are typed: the library's `memory=recall` is `--memory recall`."""

import re

# Arguments of the library that are flags by the same name.
FLAGS = (
    "memory", "verify", "verify_below", "far", "kv_bits", "kv_group_size", "max_kv_size", "max_tokens",
    "num_draft_tokens", "draft_model", "prefill_step_size",
)  # fmt: skip
_VALUE = re.compile(rf"(?<![\w./:=,-])({'|'.join(FLAGS)})=(?=\w)")
_NAME = re.compile(
    rf"(?<![\w./:=,-])(?<!/set )({'|'.join(n for n in FLAGS if '_' in n)})(?![\w=./-])"
)
_BOTH = re.compile(r"\bsnapkv and policy\b")
_FIRST = re.compile(rf"^({'|'.join(FLAGS)})(?= must be )")


def flag_of(name: str) -> str:
    """The flag of an argument."""
    return f"--{name.replace('_', '-')}"


def in_flags(text: str) -> str:
    """A sentence of the library for those who typed flags."""
    text = _VALUE.sub(lambda found: f"{flag_of(found[1])} ", text)
    text = _BOTH.sub("--snapkv and --policy", text)
    for names in (_NAME, _FIRST):
        text = names.sub(lambda found: flag_of(found[1]), text)
    return text
