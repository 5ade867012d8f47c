"""LongBench's scores (Bai et al., 2024), as its own metrics.py computes them: of an answer and one reference, 0 to 1.

`jieba` and `rouge` are the packages that it names. It also names fuzzywuzzy, whose ratio, without the C library that
LongBench does not ask for, is the standard library's `difflib`, rounded to hundredths: so that is taken. The ratio of
fuzzywuzzy's successors is another one, and higher.
"""

from __future__ import annotations

import difflib
import re
import string
import warnings
from collections import Counter
from collections.abc import Sequence

from .rows import require

# The Chinese punctuation that its authors list, by first and last code point; 《 is not among it.
_RANGES = (
    (0x2013, 0x2014), (0x2018, 0x2019), (0x201B, 0x201F), (0x2026, 0x2027), (0x3001, 0x3003), (0x300B, 0x3011),
    (0x3014, 0x301F), (0x3030, 0x3030), (0x303E, 0x303F), (0xFE4F, 0xFE4F), (0xFF01, 0xFF0F), (0xFF1A, 0xFF20),
    (0xFF3B, 0xFF40), (0xFF5B, 0xFF64),
)  # fmt: skip
_PUNCTUATION = set(string.punctuation).union(
    *(map(chr, range(first, last + 1)) for first, last in _RANGES)
)


def f1(answer: Sequence[str], reference: Sequence[str]) -> float:
    """The harmonic mean of precision and recall of words, each counted as often as it occurs."""
    same = sum((Counter(answer) & Counter(reference)).values())
    if not same:
        return 0.0
    precision, recall = same / len(answer), same / len(reference)
    return 2 * precision * recall / (precision + recall)


def qa_f1(answer: str, reference: str) -> float:
    return f1(words(answer), words(reference))


def words(text: str) -> list[str]:
    """Lower-case words without articles, punctuation taken out."""
    kept = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", kept).split()


def qa_f1_zh(answer: str, reference: str) -> float:
    return f1(_words_zh(answer), _words_zh(reference))


def _words_zh(text: str) -> list[str]:
    return [word for word in map(without_punctuation, _cut(text)) if word]


def without_punctuation(text: str) -> str:
    """Lower-case text without white space and punctuation, ASCII's and Chinese."""
    return "".join(c for c in text.lower() if not (c.isspace() or c in _PUNCTUATION))


def rouge_l(answer: str, reference: str) -> float:
    """F of the longest common subsequences of words, sentence by sentence; 0 if the package can't tell."""
    try:
        scores = (
            require("rouge", "ROUGE-L").Rouge(metrics=["rouge-l"]).get_scores(answer, reference)
        )
    except (
        ValueError,
        RecursionError,
    ):  # an empty text, or a very long sentence: 0 with LongBench, too
        return 0.0
    return scores[0]["rouge-l"]["f"]


def rouge_l_zh(answer: str, reference: str) -> float:
    return rouge_l(" ".join(_cut(answer)), " ".join(_cut(reference)))


def _cut(text: str) -> list[str]:
    """The words that jieba finds in a Chinese text."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it imports what setuptools wants to be rid of
        jieba = require("jieba", "a score of Chinese answers")
    jieba.setLogLevel("WARNING")
    return list(jieba.cut(text, cut_all=False))


def counted(answer: str, reference: str) -> float:
    """The share of the answer's numbers that are the reference."""
    numbers = re.findall(r"\d+", answer)
    return numbers.count(reference) / len(numbers) if numbers else 0.0


def retrieved(answer: str, reference: str) -> float:
    """The share of the answer's numbers that are the paragraph's."""
    (number,) = re.findall(r"(?:Paragraph |段落)(\d+)", reference)[:1] or [None]
    return counted(answer, number) if number is not None else 0.0


def edit_similarity(answer: str, reference: str) -> float:
    """Of the answer's first line that is neither a comment nor a fence."""
    lines = answer.lstrip("\n").split("\n")
    line = next((x for x in lines if not any(mark in x for mark in ("`", "#", "//"))), "")
    return round(100 * difflib.SequenceMatcher(None, line, reference).ratio()) / 100


def classified(answer: str, reference: str, classes: Sequence[str]) -> float:
    """One over how many classes the answer names, if the right one is among them.

    A class whose name is part of the right one's does not count. As in LongBench's own loop, which takes classes out of
    the list that it walks through, the one after such a class is not looked at.
    """
    named = [name for name in classes if name in answer]
    for name in named:
        if name in reference and name != reference:
            named.remove(name)
    return 1 / len(named) if reference in named else 0.0
