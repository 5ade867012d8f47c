"""Render a comparison as an HTML page: answers side by side, and the prompt entries that each method kept."""

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
N_TINTS = 4  # tints: 0 means evicted by all heads, 1 kept by few, and this number kept by all


def page(
    model: str, tokenizer: Any, tokens: Sequence[int], answers: Sequence[Compared], table: Table
) -> str:
    """Return an HTML page that shows each answer next to the full cache's, with differing words marked.

    Args:
        model: model name.
        tokenizer: the model's tokenizer, which decodes the prompt's tokens.
        tokens: token ids of the prompt.
        answers: the full cache's answer, followed by the answers to compare with it.
        table: figures of all answers.
    """
    text, spans = token_spans(tokenizer, list(tokens))
    full, *others = answers
    beside = [_beside(full, each, _kept_entries(text, spans, each.kept)) for each in others]
    values = {
        "title": f"{escape(model)}: answers compared",
        "parts": "".join([_table(table), *beside]),
    }
    html = Template(COMPARE_HTML.read_text(encoding="utf-8")).safe_substitute(values)
    return html.replace("$policy", content_policy(html), 1)


def _table(table: Table) -> str:
    """Render a table as HTML, preceded by its remark."""
    head = "".join(f"<th>{escape(name)}</th>" for name in table.columns)
    rows = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in table.rows)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<p>{escape(table.remark)}</p><table><tr>{head}</tr>{body}</table>"


def _beside(full: Compared, answer: Compared, kept: str) -> str:
    """Render two answers side by side, with the prompt's HTML (`kept`) below them."""
    full_html, answer_html = _marked(full.text, answer.text)
    columns = _column(full.name, full_html) + _column(answer.name, answer_html)
    about = f"<h2>{escape(answer.name)}</h2><p>{escape(answer.reason or '')}</p>"
    return f'{about}<div class="beside">{columns}</div>{kept}'


def _column(name: str, text_html: str) -> str:
    """Render an answer below its method's name."""
    return f'<div><h3>{escape(name)}</h3><div class="answer">{text_html}</div></div>'


def _marked(full: str, text: str) -> tuple[str, str]:
    """Render both texts as HTML, with marks around words that occur in only one of them."""
    full_words = re.findall(r"\s+|\S+", full)
    text_words = re.findall(r"\s+|\S+", text)
    matcher = difflib.SequenceMatcher(None, full_words, text_words, autojunk=False)
    full_html = ""
    text_html = ""
    for tag, full_start, full_stop, start, stop in matcher.get_opcodes():
        full_part = escape("".join(full_words[full_start:full_stop]))
        text_part = escape("".join(text_words[start:stop]))
        if tag in ("delete", "replace"):
            full_part = f"<del>{full_part}</del>"
        if tag in ("insert", "replace"):
            text_part = f"<ins>{text_part}</ins>"
        full_html += full_part
        text_html += text_part
    return full_html, text_html


def _kept_entries(text: str, spans: Sequence[tuple[int, int]], kept: np.ndarray | None) -> str:
    """Render the prompt as HTML, tinting each token by the share of heads that keep it.

    Return an empty string if `kept` is None.

    Args:
        text: the prompt's text.
        spans: character range `(start, stop)` of each token in the text, without gaps.
        kept: `(n_tokens,)`, share (0 to 1) of heads that keep each token's entry.
    """
    if kept is None:
        return ""
    tints = np.ceil(kept * N_TINTS).astype(int)
    pieces = []
    start = 0  # first character that is not in `pieces` yet
    for tint, run in itertools.groupby(range(len(spans)), key=lambda token: tints[token]):
        *_, last_token = run
        stop = spans[last_token][1]
        pieces.append(f'<span class="t{tint}">{escape(text[start:stop])}</span>')
        start = stop
    return f"<details><summary>Entries kept of the prompt</summary><pre>{''.join(pieces)}</pre></details>"
