"""Build the table of what eviction loses, for the sceptics page."""

from collections.abc import Iterator
from typing import Any

from readme_results import named_parts
from results_page import table

from mlx_snapkv.measure.methods import FULL_CACHE
from mlx_snapkv.measure.tables import grouped

MOST_LOSSES = 12
LEAST_LOSS = 0.2  # RULER's best score is 1
SETTINGS = {"known": "at the prompt's end", "later": "after the compression"}


def losses() -> list[str]:
    """Return a table of the RULER tasks on which policies lose most, with the largest loss first.

    Each policy has one row per task and setting, for the model on which it loses most.
    """
    worst_first = sorted(_losses(), key=lambda loss: loss["with policy"] - loss["full cache"])
    losses_by_key = grouped(worst_first, "task", "setting", "method")
    worst_losses = [key_losses[0] for key_losses in losses_by_key.values()]
    rows = [
        (
            f"{loss['model']}, {loss['length']:,}",
            f"`{loss['task']}` ({loss['asked']})",
            SETTINGS[loss["setting"]],
            f"`{loss['method']}`",
            f"{100 * loss['full cache']:.0f}",
            f"{100 * loss['with policy']:.0f}",
        )
        for loss in worst_losses[:MOST_LOSSES]
    ]
    header = "model, tokens", "task (questions)", "question", "policy", "full cache", "with policy"
    return table(header, rows)


def _losses() -> Iterator[dict[str, Any]]:
    """Yield each task on which SnapKV or KeyDiff loses at least `LEAST_LOSS`."""
    for part in named_parts():
        if part["task"] != "data":
            continue
        full_rows = {row["setting"]: row for row in part["summary"] if row["method"] == FULL_CACHE}
        for row in part["summary"]:
            if not row["method"].startswith(("snapkv", "keydiff")):
                continue
            full_scores = full_rows[row["setting"]]["by_task"]
            for task, score in row["by_task"].items():
                if full_scores[task] - score >= LEAST_LOSS:
                    yield {
                        "model": part["model"],
                        "length": row["length"],
                        "task": task,
                        "asked": row["asked"] // len(row["by_task"]),
                        "setting": row["setting"],
                        "method": row["method"],
                        "full cache": full_scores[task],
                        "with policy": score,
                    }
