"""Build the tables of what eviction loses and of facts that are still found, for the page for sceptics."""

from collections.abc import Iterator

from quality_page import entries_text
from readme_results import named_parts
from results_page import Row, load, table, written_by

from mlx_snapkv.measure.methods import FULL_CACHE
from mlx_snapkv.measure.tables import grouped
from mlx_snapkv.sparse.options import Sparse

SETTINGS = {"known": "at the prompt's end", "later": "after the compression"}


def losses() -> list[str]:
    """Return a table of each policy's largest loss in a RULER task, with the largest loss first."""
    worst_first = sorted(_losses(), key=lambda loss: loss["with policy"] - loss["full cache"])
    losses_by_key = grouped(worst_first, "setting", "method")
    worst_losses = [key_losses[0] for key_losses in losses_by_key.values()]
    rows = [
        (
            f"{loss['model']}, {loss['length']:,}",
            f"`{loss['task']}` ({loss['asked']})",
            SETTINGS[loss["setting"]],
            f"`{loss['method']}`",
            loss["entries"],
            f"{100 * loss['full cache']:.0f}",
            f"{100 * loss['with policy']:.0f}",
        )
        for loss in worst_losses
    ]
    header = (
        "model, RULER's limit",
        "task (questions)",
        "question",
        "policy",
        "entries",
        "full cache",
        "with policy",
    )
    return [written_by(load("quality")), "", *table(header, rows)]


def _losses() -> Iterator[Row]:
    """Yield each task in which a policy has a lower score than the full cache."""
    for part in named_parts():
        if part["task"] != "data":
            continue
        full_rows = {row["setting"]: row for row in part["summary"] if row["method"] == FULL_CACHE}
        for row in part["summary"]:
            if row["method"].startswith(Sparse.name):
                continue
            full_scores = full_rows[row["setting"]]["by_task"]
            for task, score in row["by_task"].items():
                if score < full_scores[task]:
                    yield {
                        "model": part["model"],
                        "length": row["length"],
                        "task": task,
                        "asked": row["asked"] // len(row["by_task"]),
                        "setting": row["setting"],
                        "method": row["method"],
                        "entries": entries_text(row),
                        "full cache": full_scores[task],
                        "with policy": score,
                    }
