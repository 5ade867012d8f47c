"""How the outputs of the field's tasks are scored, 0 to 1.

RULER's two scores are those of its own evaluation, as kvpress computes them; F1 and the choice of a letter are
LongBench's and InfiniteBench's. Every other task has the first of them, which asks less than some tasks' own scores.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

Metric = Callable[[Sequence[str], str], float]  # of references and an output


def string_match_all(references: Sequence[str], output: str) -> float:
    """The share of the references that stand in the output, whatever their case (RULER's niah, vt, cwe and fwe)."""
    text = _cleaned(output)
    return sum(reference.lower() in text for reference in references) / len(references)


def string_match_part(references: Sequence[str], output: str) -> float:
    """Whether one of the references stands in the output, whatever its case (RULER's qa)."""
    text = _cleaned(output)
    return float(any(reference.lower() in text for reference in references))


def f1(references: Sequence[str], output: str) -> float:
    """F1 of the words, without case, punctuation and articles; of several references the best."""
    return max(_f1(_words(reference), _words(output)) for reference in references)


def choice(references: Sequence[str], output: str) -> float:
    """Whether the reference is the output's letter: the last of A to D that stands alone, of its first such line."""
    found = re.search(r"\b[A-D]\b(?!.*\b[A-D]\b)", output)
    return float(found is not None and found.group() in references)


def first_line_f1(references: Sequence[str], output: str) -> float:
    """F1 of the first line that is not empty."""
    return f1(references, output.lstrip().partition("\n")[0])


METRICS: dict[str, Metric] = {
    "qa_1": string_match_part,
    "qa_2": string_match_part,
    "longdialogue_qa_eng": string_match_part,
    "longbook_choice_eng": choice,
    "code_debug": choice,
    **dict.fromkeys(("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa"), f1),
    **dict.fromkeys(("musique", "longbook_qa_eng", "shortdep_qa", "longdep_qa"), f1),
    "triviaqa": first_line_f1,
}


def metric_of(task: str) -> Metric:
    """The score of a task; of LongBench-E's tasks (`-e`, `_e`) that of LongBench's."""
    return METRICS.get(re.sub(r"[-_]e$", "", task), string_match_all)


def _cleaned(output: str) -> str:
    return re.sub(r"[\x00-\x1f]", "", output.strip()).strip().lower()


def _words(text: str) -> Counter[str]:
    bare = "".join(c for c in text.lower() if c not in string.punctuation)
    return Counter(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def _f1(wanted: Counter[str], found: Counter[str]) -> float:
    """2PR / (P + R), of words each counted as often as it stands there."""
    total = wanted.total() + found.total()
    return 2 * (wanted & found).total() / total if total else 0.0
