"""The ways of docs/quality.md: every policy, and what is worth telling apart of the better ones."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from mlx_snapkv.evals.answering import KNOWN, Method
from mlx_snapkv.evals.headwise import headwise
from mlx_snapkv.policies import POLICIES, resolve_policy

BLOCK = 256
# SnapKV's, larger by default than these budgets.
SIZE = "n_sink=4,n_window={window},min_ctx=0"
WINDOW, SMALL_WINDOW = 48, 32

SNAPKV = "snapkv:budget={share}%," + SIZE
ADAPTIVE = "snapkv:budget=adaptive:{share}%," + SIZE
CRITICAL = SNAPKV + ",critical=true"
KEYDIFF = f"keydiff:budget={{share}}%,block={BLOCK}"
ONCE = "keydiff:budget=adaptive:{share}%,pool_kernel=5,schedule=once"
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
        by_mask: the policy is a head-wise method, as --by-mask.
        window: SnapKV's recent window; by default 48 entries, and 32 of the smallest budgets.
    """

    name: str
    policy: str
    shares: tuple[int, ...]
    options: dict[str, str] = field(default_factory=dict)
    by_mask: bool = False
    window: int | None = None

    def method(self, share: int) -> Method:
        window = self.window or (WINDOW if share <= 16 else SMALL_WINDOW)
        text = self.policy.format(share=100 / share, wide=min(50, 400 / share), window=window)
        resolved = headwise(text) if self.by_mask else resolve_policy(policy=text)
        return Method(f"{self.name}, 1/{share}", resolved, self.options)


UNSURE = {"memory": "recall", "verify": "unsure"}
SNAPKV_UNSURE = Line("snapkv, recall, unsure", SNAPKV, (16, 32), UNSURE)


def controls(share: int) -> list[Line]:
    """All other policies, which score the whole prompt at once, at one budget."""
    told = {"snapkv", "keydiff", "kvzip"}
    return [
        Line(name, f"{name}:budget={{share}}%,schedule=once", (share,))
        for name in POLICIES
        if name not in told
    ]


def lines(setting: str) -> list[Line]:
    """The lines of a setting in the order in which they are asked: what matters most and costs least first."""
    book = Line(
        "book, unsure", BOOK, (16,), UNSURE | {"memory": "recall:file"}, window=SMALL_WINDOW
    )
    if setting == KNOWN:
        return [
            Line("snapkv", SNAPKV, (8, 16, 32)),
            Line("snapkv, adaptive", ADAPTIVE, (8, 16, 32)),
            Line("snapkv, critical", CRITICAL, (16, 32)),
            Line("snapkv, adaptive and critical", ADAPTIVE + ",critical=true", (16, 32)),
            SNAPKV_UNSURE,
            Line("keydiff then snapkv", TWO_STAGES, (8, 16)),
            Line("keydiff, pool_kernel=5", KEYDIFF + ",pool_kernel=5", (8, 16)),
            Line("keydiff", KEYDIFF, (8, 16)),
            book,
            *controls(8),
        ]
    return [
        Line("keydiff", KEYDIFF, (4, 8, 16)),
        Line("keydiff, pool_kernel=5", KEYDIFF + ",pool_kernel=5", (4, 8, 16)),
        Line("snapkv", SNAPKV, (4, 8, 16), window=SMALL_WINDOW),
        Line("snapkv, recall", SNAPKV, (16, 32), {"memory": "recall"}, window=SMALL_WINDOW),
        replace(SNAPKV_UNSURE, window=SMALL_WINDOW),
        book,
        Line("keydiff, pool_kernel=5, once, adaptive", ONCE, (8, 16)),
        Line("kvzip, adaptive", "kvzip:budget=adaptive:{share}%", (4, 8)),
        *controls(4),
        Line("kvzip", "kvzip:budget={share}%", (4, 8)),
    ]


# What SnapKV's options are worth, the question known; the first line is the default.
OPTIONS = (
    "",
    "lookahead=0",
    "lookahead=8",
    "lookahead=16",
    "lookahead=32",
    "on_full=grow",
    "pool_kernel=7",
    "pool_kernel=13",
    "pool_kernel=31",
    "heads=shared,last_token=false",
)
KERNELS = (1, 3, 5, 9, 15)  # KeyDiff's, 1 being none, the default


def snapkv_options() -> list[Line]:
    """SnapKV with one option changed at a time."""
    found = []
    for text in OPTIONS:
        name = f"snapkv, {text}" if text else "snapkv"
        found.append(Line(name, f"{SNAPKV},{text}".rstrip(","), (16,)))
    return [*found, Line(f"snapkv, n_window={SMALL_WINDOW}", SNAPKV, (16,), window=SMALL_WINDOW)]


def keydiff_kernels() -> list[Line]:
    """KeyDiff with its scores averaged over fewer and more neighbours."""
    return [
        Line(
            f"keydiff, pool_kernel={kernel}" if kernel > 1 else "keydiff",
            f"{KEYDIFF},pool_kernel={kernel}",
            (8, 16),
        )
        for kernel in KERNELS
    ]


def needles() -> list[Line]:
    """What the selection alone is worth, for values longer than what it keeps around each vote."""
    ways = {"snapkv": SNAPKV, "snapkv, adaptive": ADAPTIVE, "snapkv, critical": CRITICAL}
    return [
        Line(name, policy + ",lookahead=0", (16, 32), window=SMALL_WINDOW)
        for name, policy in ways.items()
    ]


def masks() -> list[Line]:
    """Head-wise budgets beside those that are shipped; FastGen's heads choose how much they keep."""
    return [
        Line("snapkv", SNAPKV, (16, 32)),
        Line("snapkv, adaptive", ADAPTIVE, (16, 32)),
        Line("adakv of snapkv", f"adakv of {SNAPKV}", (16, 32), by_mask=True),
        *(
            Line(f"fastgen, recovery={part}", f"fastgen:recovery={part}", (1,), by_mask=True)
            for part in (0.9, 0.99)
        ),
    ]


def longer() -> list[Line]:
    """What the table of all policies says of the better ones, asked of other documents."""
    return [
        Line("snapkv", SNAPKV, (8, 16)),
        Line("snapkv, adaptive", ADAPTIVE, (8, 16)),
        replace(SNAPKV_UNSURE, shares=(16,)),
        Line("keydiff, pool_kernel=5", KEYDIFF + ",pool_kernel=5", (8,)),
    ]
