"""The page of a comparison: the answers side by side, and what each method kept of the prompt."""

import difflib
import itertools
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from ..content_policy import content_policy
from .compare import Compared
from .sentences import token_spans
from .tables import Table

COMPARE_HTML = Path(__file__).with_name("compare.html")
LEVELS = 4  # tints, from kept nowhere (0) to kept by all heads


def page(
    model: str, tokenizer: Any, tokens: Sequence[int], answers: Sequence[Compared], table: Table
) -> str:
    """One HTML file: the answers beside the first, what differs marked, and what each method kept."""
    text, spans = token_spans(tokenizer, list(tokens))
    full, *others = answers
    beside = [_beside(full, each, _tinted(text, spans, each.kept)) for each in others]
    given = {
        "title": f"{escape(model)}: answers compared",
        "parts": "".join([_table(table), *beside]),
    }
    html = Template(COMPARE_HTML.read_text(encoding="utf-8")).safe_substitute(given)
    return html.replace("$policy", content_policy(html), 1)


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in table.columns)
    rows = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in table.rows)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<p>{escape(table.remark)}</p><table><tr>{head}</tr>{body}</table>"


def _beside(full: Compared, answer: Compared, kept: str) -> str:
    theirs, ours = (
        f'<div><h3>{escape(each.name)}</h3><div class="answer">{marked}</div></div>'
        for each, marked in zip((full, answer), _marked(full.text, answer.text))
    )
    about = f"<h2>{escape(answer.name)}</h2><p>{escape(answer.reason or '')}</p>"
    return f'{about}<div class="beside">{theirs}{ours}</div>{kept}'


def _marked(full: str, text: str) -> tuple[str, str]:
    """Both texts, with the words that only one of them has marked."""
    a, b = (re.findall(r"\s+|\S+", said) for said in (full, text))
    theirs, ours = "", ""
    for tag, i, j, k, m in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        left, right = escape("".join(a[i:j])), escape("".join(b[k:m]))
        theirs += left if tag in ("equal", "insert") else f"<del>{left}</del>"
        ours += right if tag in ("equal", "delete") else f"<ins>{right}</ins>"
    return theirs, ours


def _tinted(text: str, spans: Sequence[tuple[int, int]], kept: np.ndarray | None) -> str:
    """The prompt, each token tinted by the share of heads that keep it."""
    if kept is None:
        return ""
    levels = np.ceil(kept * LEVELS).astype(int)
    pieces, end = [], 0
    for level, run in itertools.groupby(range(len(spans)), key=lambda i: levels[i]):
        start, end = end, max(end, spans[list(run)[-1]][1])
        pieces.append(f'<span class="t{level}">{escape(text[start:end])}</span>')
    return f"<details><summary>Entries kept of the prompt</summary><pre>{''.join(pieces)}</pre></details>"
