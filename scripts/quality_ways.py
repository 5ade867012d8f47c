"""The ways of docs/quality.md: every policy, and what is worth telling apart of the better ones."""

from __future__ import annotations

from dataclasses import dataclass, field

from mlx_snapkv.evals.asking import KNOWN, LATER, Way
from mlx_snapkv.policies import POLICIES, resolve_policy

N_SINK, N_WINDOW, BLOCK = 4, 32, 256
SHARES = {KNOWN: (8, 16, 32), LATER: (4, 8, 16)}  # one entry in so many is kept
SIZE = f"n_sink={N_SINK},n_window={N_WINDOW},min_ctx=0"  # SnapKV's, larger by default than these budgets

SNAPKV = "snapkv:budget={share}%," + SIZE
ADAPTIVE = "snapkv:budget=adaptive:{share}%," + SIZE
KEYDIFF = f"keydiff:budget={{share}}%,block={BLOCK}"
TWO_STAGES = f"keydiff:budget={{wide}}%,block={BLOCK} then {SNAPKV}"
BOOK = f"{KEYDIFF} then {SNAPKV}"


@dataclass(frozen=True)
class Line:
    """A line of the tables, which is a curve of the picture.

    Attributes:
        name: what both call it.
        policy: as --policy, with {share} for the budget in percent and {wide} for four times that, half at most.
        shares: the budgets to measure, one entry in so many.
        options: `memory` and `verify`, as of `generate`.
    """

    name: str
    policy: str
    shares: tuple[int, ...]
    options: dict[str, str] = field(default_factory=dict)

    def way(self, share: int) -> Way:
        text = self.policy.format(share=100 / share, wide=min(50, 400 / share))
        return Way(f"{self.name}, 1/{share}", resolve_policy(policy=text), self.options)


def variants(shares: tuple[int, ...]) -> list[Line]:
    """SnapKV as it is by default, and its two other ways to share out or rank."""
    return [
        Line("snapkv", SNAPKV, shares),
        Line("snapkv, adaptive", ADAPTIVE, shares),
        Line("snapkv, critical", SNAPKV + ",critical=true", shares),
        Line("snapkv, adaptive and critical", ADAPTIVE + ",critical=true", shares),
    ]


def keydiffs(shares: tuple[int, ...]) -> list[Line]:
    return [
        Line("keydiff", KEYDIFF, shares),
        Line("keydiff, pool_kernel=5", KEYDIFF + ",pool_kernel=5", shares),
    ]


def controls(share: int) -> list[Line]:
    """All other policies, which score the whole prompt at once, at one budget."""
    told = {"snapkv", "keydiff", "kvzip"}
    return [
        Line(name, f"{name}:budget={{share}}%,schedule=once", (share,))
        for name in POLICIES
        if name not in told
    ]


def recalling(shares: tuple[int, ...] = (16, 32)) -> list[Line]:
    """Every entry stays available."""
    unsure = {"memory": "recall", "verify": "unsure"}
    return [
        Line("snapkv, recall", SNAPKV, shares, {"memory": "recall"}),
        Line("snapkv, recall, unsure", SNAPKV, shares, unsure),
        Line("book, unsure", BOOK, shares, unsure | {"memory": "recall:file"}),
    ]


def lines(setting: str) -> list[Line]:
    """The lines of a setting, as its tables list them; those that matter most first."""
    shares = SHARES[setting]
    if setting == KNOWN:
        stages = Line("keydiff then snapkv", TWO_STAGES, shares)
        return [*variants(shares), *keydiffs(shares), stages, *recalling(), *controls(shares[0])]
    kvzip = "kvzip:budget={share}%"
    zips = [
        Line("kvzip, adaptive", kvzip.replace("=", "=adaptive:"), shares),
        Line("kvzip", kvzip, shares[:2]),
    ]
    snapkv = Line("snapkv", SNAPKV, shares)
    return [*keydiffs(shares), *zips, snapkv, *recalling(), *controls(shares[0])]


# What SnapKV's options are worth, the question known; the first line is the default.
OPTIONS = [
    "",
    "lookahead=0",
    "lookahead=8",
    "pool_kernel=1",
    "pool_kernel=7",
    "pool_kernel=13",
    "pool_kernel=31",
    "n_window=64",
    "heads=shared,last_token=false",
]
OPTIONS_SHARE = 16


def options() -> list[Line]:
    """SnapKV with one option changed at a time."""
    found = []
    for text in OPTIONS:
        policy = SNAPKV if not text.startswith("n_window") else SNAPKV.replace("n_window=32,", "")
        policy += "," + text if text else ""
        found.append(Line(f"snapkv, {text}" if text else "snapkv", policy, (OPTIONS_SHARE,)))
    return found


def needles() -> list[Line]:
    """What the selection alone is worth, for values longer than what it keeps around each vote."""
    chosen = variants((16, 32))[:3]
    return [Line(line.name, line.policy + ",lookahead=0", line.shares) for line in chosen]
