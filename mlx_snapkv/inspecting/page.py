"""Inspections as one HTML file that loads nothing from elsewhere."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Collection, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from ..content_policy import content_policy
from ..errors import SnapKVError
from .inspection import Inspection

PAGE = Path(__file__).with_name("page.html")
SENTENCES = 10


def page(inspections: Sequence[Inspection], model: str, special: Collection[int] = ()) -> str:
    """The page of one prompt under one or more policies, side by side.

    Args:
        model: its name.
        special: ids of tokens that are no text.

    Raises:
        SnapKVError: the prompts differ.
    """
    if len({found.tokens for found in inspections}) != 1:
        raise SnapKVError("one page shows one prompt: inspect the same with every policy")
    one = inspections[0]
    # Tokens that share a span are a group; one without a text is a group of its own.
    keys = [(*span, i if span[0] == span[1] else None) for i, span in enumerate(one.spans)]
    groups = [len(list(same)) for _, same in groupby(keys)]
    firsts = np.cumsum([0, *groups])
    group_of = np.repeat(np.arange(len(groups)), groups)
    marks = set(special)
    data = {
        "model": model,
        "text": one.text,
        "sizes": [_units(one.text[slice(*one.spans[i])]) for i in firsts[:-1]],
        "several": {g: size for g, size in enumerate(groups) if size > 1},
        "special": sorted({int(group_of[i]) for i, t in enumerate(one.tokens) if t in marks}),
        "policies": [_policy(found, group_of) for found in inspections],
    }
    # In a script element "<" could begin its end, or a comment.
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    html = PAGE.read_text(encoding="utf-8")
    before, after = html.replace("POLICY", content_policy(html), 1).split("DATA")
    return before + text + after


def _policy(found: Inspection, group_of: np.ndarray) -> dict[str, Any]:
    """What the page shows of one inspection; places are those of groups."""
    attended = found.attended
    groups = np.where(attended.positions < 0, -1, group_of[attended.positions])
    rows = np.concatenate([layer[:n] for layer, n in zip(found.kept, found.heads, strict=True)])
    n_kept = (found.positions >= 0).sum(axis=2).max(axis=1).tolist()
    return {
        "policy": found.policy,
        "told": str(found.report),
        "dropped": found.report.compressed,
        "heads": list(found.heads),
        "layers": list(zip(found.layers, n_kept, found.shares, strict=True)),
        "without": list(found.layers_without),
        "bits": _text(np.packbits(rows, axis=1, bitorder="little")),
        "sentences": [
            asdict(s) | {"start": int(group_of[s.start]), "stop": int(group_of[s.stop - 1]) + 1}
            for s in found.sentences[:SENTENCES]
        ],
        "answer": {
            "tokens": list(found.answer_tokens),
            "before": attended.n_before,
            "per_layer": attended.positions.shape[2],
            "positions": _text(groups.astype("<i4")),
            "weights": _text((attended.weights * 65535).round().astype("<u2")),
            "own": [round(float(x), 4) for x in attended.own.ravel()],
        },
    }


def _text(array: np.ndarray) -> str:
    return b64encode(array.tobytes()).decode()


def _units(text: str) -> int:
    """Length of a text in JavaScript."""
    return len(text.encode("utf-16-le")) // 2
