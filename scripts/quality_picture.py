"""Draw docs/quality.png from docs/quality.json: how far each method moves predictions on a text.

python scripts/quality_picture.py
"""

from collections.abc import Iterator
from typing import Any

from readme_results import COMPARED, predictions_on_texts
from results_page import ROOT

from mlx_snapkv.measure.intervals import LEAST_TEXTS
from mlx_snapkv.measure.tables import put_figure

LENGTH = 1400  # tokens of the texts that are drawn
BAR_HEIGHT = 0.8 / len(COMPARED)


def measured_texts() -> Iterator[tuple[str, dict[str, dict[str, float]]]]:
    """Yield a label for each model and kind of text, and the KL by method, with its interval.

    With fewer than `LEAST_TEXTS` texts, the interval is empty.
    """
    for part, kind, by_method in predictions_on_texts():
        if part["length"] == LENGTH:
            kl = {name: row["kl"] for name, row in by_method.items()}
            if any(row["texts"] < LEAST_TEXTS for row in by_method.values()):
                kl = {name: dict.fromkeys(("mean", "low", "high"), kl[name]["mean"]) for name in kl}
            yield f"{part['model']}, {kind}", kl


def figure() -> Any:
    """Return a matplotlib figure with a group of bars for each model and kind of text."""
    from matplotlib.figure import Figure

    texts = list(measured_texts())
    picture = Figure(figsize=(8, 1 + 0.9 * len(texts)), layout="constrained")
    axes = picture.subplots()
    for i, (name, method) in enumerate(COMPARED.items()):
        own = [(place + i * BAR_HEIGHT, kl[method]) for place, (_, kl) in enumerate(texts)]
        means = [kl["mean"] for _, kl in own]
        errors = [
            [kl["mean"] - kl["low"] for _, kl in own],
            [kl["high"] - kl["mean"] for _, kl in own],
        ]
        share = "reads 1/16" if name == "sparse" else "keeps 1/8"
        axes.barh([y for y, _ in own], means, BAR_HEIGHT, xerr=errors, label=f"{name}, {share}")
    middle = (len(COMPARED) - 1) / 2 * BAR_HEIGHT
    axes.set_yticks([place + middle for place in range(len(texts))], [label for label, _ in texts])
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="KL to the full cache (nats per token; lower is better)")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False)
    return picture


if __name__ == "__main__":
    put_figure(ROOT / "docs" / "quality.png", figure())
