"""Build the tables of what eviction loses and of facts that are still found, for the page for sceptics."""

from collections.abc import Iterator

from quality_page import entries_text
from readme_results import named_parts, score_text
from results_page import Row, load, table, written_by

from mlx_snapkv.measure.methods import FULL_CACHE
from mlx_snapkv.measure.tables import grouped
from mlx_snapkv.sparse.options import Sparse


def losses() -> list[str]:
    """Return a table of each policy's largest loss in a RULER task, with the largest loss first."""
    worst_first = sorted(_losses(), key=lambda loss: loss["with policy"] - loss["full cache"])
    worst_losses = [losses[0] for losses in grouped(worst_first, "method").values()]
    rows = [
        (
            f"{loss['model']}, {loss['length']:,}",
            f"`{loss['task']}` ({loss['asked']})",
            f"`{loss['method']}`",
            loss["entries"],
            score_text(loss["full cache"]),
            score_text(loss["with policy"]),
        )
        for loss in worst_losses
    ]
    header = (
        "model, RULER's limit",
        "task (questions)",
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
        (full,) = (row for row in part["summary"] if row["method"] == FULL_CACHE)
        for row in part["summary"]:
            if row["method"].startswith(Sparse.name):
                continue
            for task, score in row["by_task"].items():
                full_score = full["by_task"][task]
                if score < full_score:
                    yield {
                        "model": part["model"],
                        "length": row["length"],
                        "task": task,
                        "asked": row["asked"] // len(row["by_task"]),
                        "method": row["method"],
                        "entries": entries_text(row),
                        "full cache": full_score,
                        "with policy": score,
                    }
