"""SCBench's scores (Li et al., 2024), as its own compute_scores.py computes them: of an answer and a label, 0 to 1."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from .longbench_scores import f1, without_punctuation


def contains(answer: str, label: str) -> float:
    return float(label in answer)


def contains_all(answer: str, label: Sequence[str]) -> float:
    """The share of the label's items that stand in the answer, whatever their case, to two digits."""
    text = answer.lower()
    return round(sum(item.lower() in text for item in label) / len(label), 2)


def contains_one(answer: str, label: Sequence[str]) -> float:
    """Whether an item of the label stands in the answer; the items of a text are its characters, as there."""
    text = answer.strip().upper()
    return float(any(item.upper() in text for item in label))


def first_number(answer: str, label: Any) -> float:
    found = re.search(r"[0-9]+", answer)
    wanted = label[0] if isinstance(label, list) else label
    return float((found[0] if found else "") == wanted)


def characters_f1(answer: str, label: Sequence[str]) -> float:
    """The best F1 of Chinese characters over the label's items; over a text's characters, as there."""
    given = list(without_punctuation(answer))
    return max(f1(given, list(without_punctuation(item))) for item in label)


def choice(answer: str, label: Sequence[str]) -> float:
    """Whether the answer begins with the right letter or is the right text, or names one of these first.

    Args:
        label: the text of the right option, and its letter.
    """
    text = answer.strip()
    if not text:
        return 0.0
    if text[0] in "ABCD":
        return float(text[0] in label)
    if text in label:
        return 1.0
    text = re.sub(r" +", " ", re.sub("[\\n\"'.,?!{}]", " ", text))
    for beginning in ("answer is:", "answer:", "answer is", "option is"):
        _, there, rest = text.partition(beginning)
        if there:
            return float(rest[1:] != "" and rest[1:].startswith(tuple(label)))
    first = next((word for word in text.split() if word in "ABCD"), None)
    return float(first in label)
