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
# The highest tint, for entries that more than 3/4 of the heads keep. Tint 0 is for entries that no head keeps.
MAX_TINT = 4


def page(
    model: str, tokenizer: Any, tokens: Sequence[int], answers: Sequence[Compared], table: Table
) -> str:
    """Return an HTML page that shows each answer next to the full cache's, with differing words marked.

    Args:
        model: model name.
        tokenizer: the model's tokenizer, which decodes the prompt's tokens.
        tokens: token ids of the prompt.
        answers: the full cache's answer, followed by the answers to compare with it.
        table: the measurements of all answers.
    """
    text, spans = token_spans(tokenizer, list(tokens))
    full_answer, *other_answers = answers
    sections = [_table_html(table)]
    for answer in other_answers:
        prompt_html = _kept_entries_html(text, spans, answer.kept)
        sections.append(_side_by_side_html(full_answer, answer, prompt_html))
    template = COMPARE_HTML.read_text(encoding="utf-8")
    return Template(template).substitute(
        policy=content_policy(template),
        title=f"{escape(model)}: answers compared",
        parts="".join(sections),
    )


def _table_html(table: Table) -> str:
    """Render a table as HTML, preceded by its remark."""
    head = "".join(f"<th>{escape(name)}</th>" for name in table.columns)
    rows = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in table.rows)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<p>{escape(table.remark)}</p><table><tr>{head}</tr>{body}</table>"


def _side_by_side_html(full: Compared, answer: Compared, prompt_html: str) -> str:
    """Render two answers side by side, with the prompt's HTML (`prompt_html`) below them."""
    full_html, answer_html = _with_marked_words(full.text, answer.text)
    columns = _column_html(full.name, full_html) + _column_html(answer.name, answer_html)
    heading = f"<h2>{escape(answer.name)}</h2><p>{escape(answer.reason or '')}</p>"
    return f'{heading}<div class="beside">{columns}</div>{prompt_html}'


def _column_html(name: str, text_html: str) -> str:
    """Render an answer below its method's name."""
    return f'<div><h3>{escape(name)}</h3><div class="answer">{text_html}</div></div>'


def _with_marked_words(full_text: str, text: str) -> tuple[str, str]:
    """Render both texts as HTML, with marks around the words that differ."""
    words_and_spaces = re.compile(r"\s+|\S+")
    full_words = words_and_spaces.findall(full_text)
    words = words_and_spaces.findall(text)
    matcher = difflib.SequenceMatcher(None, full_words, words, autojunk=False)
    full_html = ""
    html = ""
    for tag, full_start, full_stop, start, stop in matcher.get_opcodes():
        full_part = escape("".join(full_words[full_start:full_stop]))
        part = escape("".join(words[start:stop]))
        if tag in ("delete", "replace"):
            full_part = f"<del>{full_part}</del>"
        if tag in ("insert", "replace"):
            part = f"<ins>{part}</ins>"
        full_html += full_part
        html += part
    return full_html, html


def _kept_entries_html(text: str, spans: Sequence[tuple[int, int]], kept: np.ndarray | None) -> str:
    """Render the prompt as HTML, tinting each token by the share of heads that keep it.

    Return an empty string if `kept` is None.

    Args:
        text: the prompt's text.
        spans: character range `(start, stop)` of each token in the text, without gaps.
        kept: `(n_tokens,)`, share (0 to 1) of heads that keep each token's entry.
    """
    if kept is None:
        return ""
    tints = np.ceil(kept * MAX_TINT).astype(int)
    html = ""
    start = 0  # first character not yet in `html`
    for tint, tokens in itertools.groupby(range(len(spans)), key=lambda token: tints[token]):
        *_, last_token = tokens
        _, stop = spans[last_token]
        html += f'<span class="t{tint}">{escape(text[start:stop])}</span>'
        start = stop
    return f"<details><summary>Entries kept of the prompt</summary><pre>{html}</pre></details>"
