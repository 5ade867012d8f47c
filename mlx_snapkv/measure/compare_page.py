"""Show a comparison as an HTML page: the answers side by side, and the prompt entries that each method kept."""

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
N_TINTS = 4  # from kept by few heads (1) to kept by all heads; 0 is kept by none


def page(
    model: str, tokenizer: Any, tokens: Sequence[int], answers: Sequence[Compared], table: Table
) -> str:
    """Return one HTML page: each answer beside the first one, with differing words marked.

    Args:
        model: the model's name.
        tokens: the prompt's token ids.
        answers: the full cache's answer, and the answers compared with it.
        table: the figures of all answers.
    """
    text, spans = token_spans(tokenizer, list(tokens))
    full, *others = answers
    beside = [_beside(full, each, _tinted(text, spans, each.kept)) for each in others]
    values = {
        "title": f"{escape(model)}: answers compared",
        "parts": "".join([_table(table), *beside]),
    }
    html = Template(COMPARE_HTML.read_text(encoding="utf-8")).safe_substitute(values)
    return html.replace("$policy", content_policy(html), 1)


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in table.columns)
    rows = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in table.rows)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<p>{escape(table.remark)}</p><table><tr>{head}</tr>{body}</table>"


def _beside(full: Compared, answer: Compared, kept: str) -> str:
    """Return the HTML of two answers side by side; `kept` is the HTML of the prompt below them."""
    theirs, ours = (
        f'<div><h3>{escape(each.name)}</h3><div class="answer">{marked}</div></div>'
        for each, marked in zip((full, answer), _marked(full.text, answer.text))
    )
    about = f"<h2>{escape(answer.name)}</h2><p>{escape(answer.reason or '')}</p>"
    return f'{about}<div class="beside">{theirs}{ours}</div>{kept}'


def _marked(full: str, text: str) -> tuple[str, str]:
    """Return both texts as HTML, with marks around the words that only one of them has."""
    a, b = (re.findall(r"\s+|\S+", answer) for answer in (full, text))
    theirs, ours = "", ""
    for tag, i, j, k, m in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        left, right = escape("".join(a[i:j])), escape("".join(b[k:m]))
        theirs += left if tag in ("equal", "insert") else f"<del>{left}</del>"
        ours += right if tag in ("equal", "delete") else f"<ins>{right}</ins>"
    return theirs, ours


def _tinted(text: str, spans: Sequence[tuple[int, int]], kept: np.ndarray | None) -> str:
    """Return the prompt as HTML, each token tinted by the share of heads that keep it; "" without `kept`."""
    if kept is None:
        return ""
    levels = np.ceil(kept * N_TINTS).astype(int)
    pieces, end = [], 0
    for level, run in itertools.groupby(range(len(spans)), key=lambda i: levels[i]):
        start, end = end, max(end, spans[list(run)[-1]][1])
        pieces.append(f'<span class="t{level}">{escape(text[start:end])}</span>')
    return f"<details><summary>Entries kept of the prompt</summary><pre>{''.join(pieces)}</pre></details>"
