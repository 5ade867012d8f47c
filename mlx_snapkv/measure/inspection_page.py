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
from .inspection import Inspection
from .sentences import Span
from .tables import put_figure

INSPECTION_HTML = Path(__file__).with_name("inspection.html")
SHOWN_SENTENCES = 10
PICTURE_COLUMNS = 256  # columns per map in the picture
MAX_TICKS = 16  # maximum number of labelled layers in the picture


def page(inspections: Sequence[Inspection], model: str, special: Collection[int] = ()) -> str:
    """Return an HTML page with inspections of one prompt under several policies, side by side.

    Args:
        inspections: one inspection per policy, all of the same prompt.
        model: model name.
        special: ids of special tokens to mark.
    """
    first = inspections[0]
    group_spans, group_sizes = _token_groups(first.spans)
    group_by_token = np.repeat(np.arange(len(group_spans)), group_sizes)
    is_special = np.isin(first.tokens, list(special))
    data = {
        "model": model,
        "text": first.text,
        "sizes": [_utf16_length(first.text[start:stop]) for start, stop in group_spans],
        "several": {group: n_tokens for group, n_tokens in enumerate(group_sizes) if n_tokens > 1},
        "special": np.unique(group_by_token[is_special]).tolist(),
        "policies": [_policy_data(inspection, group_by_token) for inspection in inspections],
    }
    data_json = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    # An unescaped "<" could end the script element or start a comment.
    data_json = data_json.replace("<", "\\u003c")
    html = INSPECTION_HTML.read_text(encoding="utf-8")
    before, after = html.replace("POLICY", content_policy(html), 1).split("DATA")
    return before + data_json + after


def _utf16_length(text: str) -> int:
    """Return a text's length in JavaScript, which counts UTF-16 code units."""
    return len(text.encode("utf-16-le")) // 2


def _token_groups(spans: Sequence[Span]) -> tuple[list[Span], list[int]]:
    """Group tokens that share a span. Return the groups' spans and sizes.

    Each token without text gets a separate group.
    """
    group_spans: list[Span] = []
    group_sizes: list[int] = []
    for span, tokens in groupby(spans):
        n_tokens = len(list(tokens))
        start, stop = span
        if start == stop:  # no text
            group_spans += [span] * n_tokens
            group_sizes += [1] * n_tokens
        else:
            group_spans.append(span)
            group_sizes.append(n_tokens)
    return group_spans, group_sizes


def _policy_data(inspection: Inspection, group_by_token: np.ndarray) -> dict[str, Any]:
    """Return the page's data for one inspection.

    Sentences and attended positions refer to token groups, and kept entries to single tokens.

    Args:
        inspection: the inspection.
        group_by_token: `(n_tokens,)`, index of each token's group.
    """
    attended = inspection.attended
    attended_groups = np.where(attended.positions < 0, -1, group_by_token[attended.positions])
    # One row per KV head of each layer. Layers with fewer heads are not padded.
    kept_by_head = np.concatenate(
        [
            layer_kept[:n_heads]
            for layer_kept, n_heads in zip(inspection.kept, inspection.heads, strict=True)
        ]
    )
    n_kept = (inspection.positions >= 0).sum(axis=2).max(axis=1).tolist()
    return {
        "policy": inspection.policy,
        "report": str(inspection.report),
        "dropped": inspection.report.compressed,
        "heads": list(inspection.heads),
        "layers": list(zip(inspection.layers, n_kept, inspection.shares, strict=True)),
        "without": list(inspection.layers_without),
        "bits": _base64(np.packbits(kept_by_head, axis=1, bitorder="little")),
        "sentences": [
            asdict(sentence)
            | {
                "start": int(group_by_token[sentence.start]),
                "stop": int(group_by_token[sentence.stop - 1]) + 1,
            }
            for sentence in inspection.sentences[:SHOWN_SENTENCES]
        ],
        "answer": {
            "tokens": list(inspection.answer_tokens),
            "before": attended.n_before,
            "per_layer": attended.positions.shape[2],
            "positions": _base64(attended_groups.astype("<i4")),
            "weights": _base64((attended.weights * 65535).round().astype("<u2")),
            "own": [round(float(share), 4) for share in attended.own.ravel()],
        },
    }


def _base64(array: np.ndarray) -> str:
    return b64encode(array.tobytes()).decode()


def write_picture(inspections: Sequence[Inspection], model: str, path: Path) -> None:
    """Write a PNG file with a map of each inspection.

    A map has one row per layer and one column per part of the prompt. The colour shows the share of kept entries.
    """
    from matplotlib.figure import Figure

    # The height of each map in inches, including its title. Rows get thinner if there are many layers.
    heights = [
        0.9 + 0.22 * min(len(inspection.layers), 3 * MAX_TICKS) for inspection in inspections
    ]
    figure = Figure(figsize=(8, sum(heights) + 0.4), layout="constrained")
    all_axes = figure.subplots(len(inspections), squeeze=False, height_ratios=heights)[:, 0]
    images = [
        _draw_map(axes, inspection) for axes, inspection in zip(all_axes, inspections, strict=True)
    ]
    top_axes, bottom_axes = all_axes[0], all_axes[-1]
    top_axes.set_title(f"{model}, {top_axes.get_title(loc='left')}", fontsize=8, loc="left")
    bottom_axes.set_xlabel("position in the prompt (tokens)", fontsize=8)
    bar = figure.colorbar(images[-1], ax=list(all_axes), format="{x:.0%}")
    bar.set_label("heads that keep the entries", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    put_figure(path, figure, dpi=200)


def _draw_map(axes: Any, inspection: Inspection) -> Any:
    """Draw an inspection's map and return matplotlib's image object."""
    n_layers = len(inspection.layers)
    style: Any = {"cmap": "Blues", "vmin": 0, "vmax": 1, "interpolation": "nearest"}
    # Left, right, bottom, top: the first layer's row is at the top.
    extent = (0, inspection.n_tokens, n_layers - 0.5, -0.5)
    densities = inspection.density(PICTURE_COLUMNS)
    image = axes.imshow(densities, aspect="auto", extent=extent, **style)
    labelled_rows = range(0, n_layers, math.ceil(n_layers / MAX_TICKS))
    labels = [f"layer {inspection.layers[row]}" for row in labelled_rows]
    axes.set_yticks(labelled_rows, labels, fontsize=7)
    axes.tick_params(axis="x", labelsize=7)
    axes.set_title(
        textwrap.fill(f"{inspection.policy}: {inspection.report}", 110), fontsize=8, loc="left"
    )
    share_texts = ["" if share is None else f"{share:.0%}" for share in inspection.shares]
    has_shares = any(share_texts)
    if has_shares:
        right_axis = axes.secondary_yaxis("right")
        right_axis.set_yticks(
            labelled_rows, [share_texts[row] for row in labelled_rows], fontsize=7
        )
        right_axis.set_ylabel("of the votes", fontsize=7)
        right_axis.tick_params(length=0)
    return image
