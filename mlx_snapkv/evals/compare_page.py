"""A comparison as one HTML file: the answers side by side, what differs marked, and what each way kept."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from html import escape
from itertools import groupby
from typing import Any

import numpy as np

from ..content_policy import content_policy
from ..inspecting.sentences import token_spans
from ..reporting.table import Table
from .compare import Compared

LEVELS = 4  # tints, from kept nowhere (0) to kept by all heads
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; }
table { border-collapse: collapse; } th, td { padding: .2rem .8rem; text-align: right; }
th:first-child, td:first-child { text-align: left; }
.ways { display: grid; gap: 1rem; grid-template-columns: 1fr 1fr; }
.answer { white-space: pre-wrap; border: 1px solid #8888; padding: .8rem; overflow-wrap: anywhere; }
ins, .t4 { background: #7c48; } ins, del { text-decoration: none; } del { background: #d558; }
.t1 { background: #7c41; } .t2 { background: #7c43; } .t3 { background: #7c46; } .t0 { opacity: .55; }
details { margin: .5rem 0; } pre { white-space: pre-wrap; overflow-wrap: anywhere; }
"""
PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="generator" content="mlx-snapkv">
<meta http-equiv="Content-Security-Policy" content="POLICY">
<title>{title}</title><style>{style}</style></head><body><h1>{title}</h1>{parts}</body></html>
"""


def page(
    model: str, tokenizer: Any, tokens: Sequence[int], answers: Sequence[Compared], table: Table
) -> str:
    """The page; the first answer is the full cache's."""
    text, spans = token_spans(tokenizer, list(tokens))
    full, *others = answers
    beside = [_beside(full, each, _tinted(text, spans, each.kept)) for each in others]
    html = PAGE.format(
        title=f"{escape(model)}: answers compared",
        style=STYLE,
        parts=_table(table) + "".join(beside),
    )
    return html.replace("POLICY", content_policy(html), 1)


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in table.columns)
    rows = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in table.rows)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<p>{escape(table.remark)}</p><table><tr>{head}</tr>{body}</table>"


def _beside(full: Compared, answer: Compared, kept: str) -> str:
    theirs, ours = _marked(full.text, answer.text)
    said = escape(answer.reason or "")
    return (
        f'<h2>{escape(answer.name)}</h2><p>{said}</p><div class="ways">'
        f'<div><h3>{escape(full.name)}</h3><div class="answer">{theirs}</div></div>'
        f'<div><h3>{escape(answer.name)}</h3><div class="answer">{ours}</div></div></div>{kept}'
    )


def _marked(full: str, text: str) -> tuple[str, str]:
    """Both texts, with the words that only one of them has marked."""
    a, b = (re.findall(r"\s+|[^\s]+", said) for said in (full, text))
    theirs, ours = [], []
    for tag, i, j, k, m in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        left, right = escape("".join(a[i:j])), escape("".join(b[k:m]))
        equal = tag == "equal"
        theirs.append(left if equal or not left else f"<del>{left}</del>")
        ours.append(right if equal or not right else f"<ins>{right}</ins>")
    return "".join(theirs), "".join(ours)


def _tinted(text: str, spans: Sequence[tuple[int, int]], kept: np.ndarray | None) -> str:
    """The prompt, each token tinted by the share of heads that keep it."""
    if kept is None:
        return ""
    levels = np.ceil(kept * LEVELS).astype(int)
    pieces, end = [], 0
    for level, run in groupby(range(len(spans)), key=lambda i: levels[i]):
        start, end = end, max(end, spans[list(run)[-1]][1])
        pieces.append(f'<span class="t{level}">{escape(text[start:end])}</span>')
    return f"<details><summary>What was kept of the prompt</summary><pre>{''.join(pieces)}</pre></details>"
