"""Render inspections as a self-contained HTML file or as a picture."""

import json
import math
import textwrap
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
from .sentences import Span
from .tables import put_figure

INSPECTION_HTML = Path(__file__).with_name("inspection.html")
SHOWN_SENTENCES = 10
PICTURE_COLUMNS = 256  # columns of a map in the picture
MAX_TICKS = 16  # maximum number of labelled layers in the picture


def page(inspections: Sequence[Inspection], model: str, special: Collection[int] = ()) -> str:
    """Return an HTML page with inspections of one prompt under several policies, side by side.

    Args:
        inspections: one inspection per policy, all of the same prompt.
        model: model name.
        special: ids of special tokens, which the page marks.

    Raises: SnapKVError: the prompts differ.
    """
    if len({inspection.tokens for inspection in inspections}) != 1:
        raise SnapKVError("a page shows one prompt: inspect the same prompt with every policy")
    first = inspections[0]
    groups = _groups(first.spans)
    n_tokens = [n for _, n in groups]
    group_of = np.repeat(np.arange(len(groups)), n_tokens)
    is_special = np.isin(first.tokens, list(special))
    data = {
        "model": model,
        "text": first.text,
        # JavaScript counts UTF-16 code units.
        "sizes": [
            len(first.text[start:stop].encode("utf-16-le")) // 2 for (start, stop), _ in groups
        ],
        "several": {group: n for group, n in enumerate(n_tokens) if n > 1},
        "special": np.unique(group_of[is_special]).tolist(),
        "policies": [_policy(inspection, group_of) for inspection in inspections],
    }
    # An unescaped "<" could end the script element, or begin a comment.
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    html = INSPECTION_HTML.read_text(encoding="utf-8")
    before, after = html.replace("POLICY", content_policy(html), 1).split("DATA")
    return before + text + after


def _groups(spans: Sequence[Span]) -> list[tuple[Span, int]]:
    """Group tokens that share a span. Return each group's span and number of tokens.

    Tokens without text are not grouped.
    """
    groups: list[tuple[Span, int]] = []
    for span, tokens in groupby(spans):
        n_tokens = len(list(tokens))
        is_empty = span[0] == span[1]
        groups += [(span, 1)] * n_tokens if is_empty else [(span, n_tokens)]
    return groups


def _policy(inspection: Inspection, group_of: np.ndarray) -> dict[str, Any]:
    """Return the page's data for one inspection, with groups in place of tokens.

    Args:
        inspection: the inspection.
        group_of: `(n_tokens,)`, index of each token's group.
    """
    attended = inspection.attended
    groups = np.where(attended.positions < 0, -1, group_of[attended.positions])
    # One row per KV head of each layer. Layers with fewer heads are not padded.
    rows = np.concatenate(
        [layer[:n] for layer, n in zip(inspection.kept, inspection.heads, strict=True)]
    )
    n_kept = (inspection.positions >= 0).sum(axis=2).max(axis=1).tolist()
    return {
        "policy": inspection.policy,
        "report": str(inspection.report),
        "dropped": inspection.report.compressed,
        "heads": list(inspection.heads),
        "layers": list(zip(inspection.layers, n_kept, inspection.shares, strict=True)),
        "without": list(inspection.layers_without),
        "bits": _base64(np.packbits(rows, axis=1, bitorder="little")),
        "sentences": [
            asdict(s) | {"start": int(group_of[s.start]), "stop": int(group_of[s.stop - 1]) + 1}
            for s in inspection.sentences[:SHOWN_SENTENCES]
        ],
        "answer": {
            "tokens": list(inspection.answer_tokens),
            "before": attended.n_before,
            "per_layer": attended.positions.shape[2],
            "positions": _base64(groups.astype("<i4")),
            "weights": _base64((attended.weights * 65535).round().astype("<u2")),
            "own": [round(float(x), 4) for x in attended.own.ravel()],
        },
    }


def _base64(array: np.ndarray) -> str:
    return b64encode(array.tobytes()).decode()


def write_picture(inspections: Sequence[Inspection], model: str, path: Path) -> None:
    """Write a PNG file with a map of each inspection.

    A map has one row per layer and one column per part of the prompt. The colour shows the share of kept entries.
    """
    from matplotlib.figure import Figure

    heights = [
        0.9 + 0.22 * min(len(inspection.layers), 3 * MAX_TICKS) for inspection in inspections
    ]
    figure = Figure(figsize=(8, sum(heights) + 0.4), layout="constrained")
    rows = figure.subplots(len(inspections), squeeze=False, height_ratios=heights)[:, 0]
    images = [_draw(axes, inspection) for axes, inspection in zip(rows, inspections, strict=True)]
    rows[0].set_title(f"{model}, {rows[0].get_title(loc='left')}", fontsize=8, loc="left")
    rows[-1].set_xlabel("position in the prompt (tokens)", fontsize=8)
    bar = figure.colorbar(images[-1], ax=list(rows), format="{x:.0%}")
    bar.set_label("heads that keep the entries", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    put_figure(path, figure, dpi=200)


def _draw(axes: Any, inspection: Inspection) -> Any:
    """Draw an inspection's map and return matplotlib's image object."""
    n_layers = len(inspection.layers)
    shades: Any = {"cmap": "Blues", "vmin": 0, "vmax": 1, "interpolation": "nearest"}
    extent = (0, inspection.n_tokens, n_layers - 0.5, -0.5)
    image = axes.imshow(inspection.density(PICTURE_COLUMNS), aspect="auto", extent=extent, **shades)
    shown = range(0, n_layers, math.ceil(n_layers / MAX_TICKS))
    axes.set_yticks(shown, [f"layer {inspection.layers[i]}" for i in shown], fontsize=7)
    axes.tick_params(axis="x", labelsize=7)
    axes.set_title(
        textwrap.fill(f"{inspection.policy}: {inspection.report}", 110), fontsize=8, loc="left"
    )
    shares = ["" if share is None else f"{share:.0%}" for share in inspection.shares]
    if any(shares):
        right = axes.secondary_yaxis("right")
        right.set_yticks(shown, [shares[i] for i in shown], fontsize=7)
        right.set_ylabel("of the votes", fontsize=7)
        right.tick_params(length=0)
    return image
