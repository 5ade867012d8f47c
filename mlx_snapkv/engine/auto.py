"""What to take where nobody says: one answer for `policy="auto"`, `plan`, `compare` and `policies --choose`."""

from __future__ import annotations

from typing import NamedTuple


class Setting(NamedTuple):
    """What to keep, a policy as it is typed or None for the full cache, and what becomes of the other entries."""

    policy: str | None
    memory: str = "drop"


SNAPKV = Setting("snapkv:top_k=4096")
RECALLED = SNAPKV._replace(memory="recall")
BOOK = Setting("keydiff:budget=4096 then snapkv:top_k=1024", "recall:file")


def worth_comparing(n_prompt: int) -> list[str]:
    """Three policies to compare on a prompt: as recommended, a quarter of that, and read within a budget.

    Of fewer than about 20,000 tokens budgets are smaller, so that something is evicted.
    """
    top_k = 4096
    while top_k > 16 and 16 * top_k > 3 * n_prompt:  # 4/3 of top_k are kept: at most a quarter
        top_k //= 2
    within = f"keydiff:budget={2 * top_k} then snapkv:top_k={top_k // 2}"
    return [f"snapkv:top_k={top_k}", f"snapkv:top_k={max(16, top_k // 4)}", within]
