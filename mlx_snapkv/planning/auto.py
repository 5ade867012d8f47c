"""What to take where nobody says: one answer for `policy="auto"`, `plan`, `compare` and `policies --choose`."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..models.rope import trained_length
from ..policies import Policy, SnapKV, Stages, resolve_policy
from .config import CompressionConfig
from .footprint import EntrySizes, Footprint, weight_bytes
from .machine import free_memory
from .report import CompressionReport
from .units import format_bytes

AUTO = "auto"
QUESTION, CONVERSATION, BATCH = "question", "conversation", "batch"


class Setting(NamedTuple):
    """A policy as it is typed, or None for the full cache, and what becomes of the entries that it does not keep."""

    policy: str | None
    memory: str = "drop"

    def __str__(self) -> str:
        memory = "" if self.memory == "drop" else f", memory={self.memory}"
        return f"{self.policy or 'the full cache'}{memory}"


def _within(budget: int, memory: str = "drop") -> Setting:
    return Setting(f"keydiff:budget={budget} then snapkv:top_k={budget // 4}", memory)


FULL = Setting(None)
SNAPKV = Setting("snapkv:top_k=4096")
RECALLED = SNAPKV._replace(memory="recall")
SMALL = _within(8192)
BOOK = _within(4096, "recall:file")
FEW: int = 2 * SnapKV(top_k=4096).budget  # type: ignore[operator,assignment]  # tokens: less than half would be evicted
TYPICAL = 32_768  # tokens of the prompts to come, where none is known

# By task, from the best for the answer to the smallest.
SETTINGS = {
    QUESTION: (SNAPKV, SMALL, *(_within(n) for n in (4096, 2048, 1024, 512))),
    CONVERSATION: (RECALLED, BOOK, *(_within(n, "recall:file") for n in (2048, 1024, 512))),
}
SETTINGS[BATCH] = SETTINGS[QUESTION]
WHY = {
    QUESTION: "the question chooses what the answer needs of so long a prompt",
    CONVERSATION: "every token then chooses anew among all entries, and reads few",
    BATCH: "small caches are decoded together",
}


class Cost(NamedTuple):
    """Bytes that a setting takes at most, and of them for entries; a sentence if tokens are too far."""

    total: int
    kv: int
    beyond: str | None = None


@dataclass(frozen=True)
class Taken:
    """A setting, and why it was taken; `fits` is false if none does and this is the smallest."""

    setting: Setting
    why: str
    fits: bool = True

    def policy(self, min_ctx: int = 0) -> Policy | Stages | None:
        """The policy; one that chooses once leaves prompts below `min_ctx` alone."""
        found = resolve_policy(policy=self.setting.policy)
        return dataclasses.replace(found, min_ctx=min_ctx) if isinstance(found, SnapKV) else found

    def __str__(self) -> str:
        return f"{AUTO}: {self.setting}, because {self.why}"


def recommended(
    n_prompt: int,
    task: str,
    cost: Callable[[Setting], Cost],
    usable: int,
    *,
    kv_memory: int | None = None,
    can_compress: bool = True,
) -> Taken:
    """The best setting that fits in `usable` bytes, `kv_memory` of them for entries: the full cache for few tokens,
    else what suits the task."""
    if not can_compress:
        return Taken(FULL, "this model's entries can't be compressed")
    few = n_prompt < FEW
    settings = (FULL, *SETTINGS[task]) if few else SETTINGS[task]
    costs = {setting: cost(setting) for setting in settings}
    most = usable if kv_memory is None else kv_memory
    fit = [s for s in settings if costs[s].total <= usable and costs[s].kv <= most]
    first = settings[0]
    if not fit:
        room = format_bytes(min(usable, most))
        return Taken(settings[-1], f"nothing fits {room}, and it takes the least", False)
    best = next((s for s in fit if costs[s].beyond is None), fit[0])
    if best is first:
        why = f"fewer than half of {n_prompt:,} entries would be evicted" if few else WHY[task]
    elif first not in fit:
        over_kv = costs[first].kv > most
        need, limit = (costs[first].kv, most) if over_kv else (costs[first].total, usable)
        why = f"{first} would take {format_bytes(need)}, and {format_bytes(limit)} may be used"
    else:
        why = "it evicts while it reads, which keeps distances within the length that the model was trained to"
    return Taken(best, why)


def auto(
    model: Any,
    n_prompt: int | None,
    task: str,
    *,
    max_tokens: int = 256,
    kv_memory: int | None = None,
) -> Taken:
    """What to take for a prompt of an mlx-lm model on this machine; without `n_prompt`, for those to come.

    The task is one of `SETTINGS`; `kv_memory` are the bytes that entries are to keep to.
    """
    n = n_prompt or min(TYPICAL, trained_length(model) or TYPICAL)
    n_answer = min(max(0, max_tokens), TYPICAL)
    sizes, weights = EntrySizes(model), weight_bytes(model)

    def cost(setting: Setting) -> Cost:
        policy = resolve_policy(policy=setting.policy)
        kv = Footprint(sizes, policy).need(n, n_answer).most
        return Cost(weights + kv, kv, CompressionConfig(policy, setting.memory).warning(model, n))

    can_compress = sizes.refusal is None
    return recommended(n, task, cost, free_memory(), kv_memory=kv_memory, can_compress=can_compress)


def asked_for(
    model: Any,
    n_prompt: int,
    max_tokens: int,
    snapkv: Any,
    policy: Any,
    on_report: Callable[[CompressionReport], None] | None,
    options: dict[str, Any],
) -> tuple[CompressionConfig, Callable[[CompressionReport], None] | None, dict[str, Any]]:
    """What the keywords ask for, and mlx-lm's; with "auto" or `snapkv=True`, the report tells what was taken."""
    if policy != AUTO and (snapkv is not True or policy is not None):
        config, options = CompressionConfig.taken_from(options, resolve_policy(snapkv, policy))
        return config, on_report, options
    config, options = CompressionConfig.taken_from(options)
    task = CONVERSATION if config.retains else QUESTION
    taken = auto(model, n_prompt, task, max_tokens=max_tokens)
    found = taken.policy()
    verify = None if found is None else config.verify

    def explained(report: CompressionReport) -> None:
        report.auto = str(taken)
        report.reason = report.reason if found else taken.why
        if on_report is not None:
            on_report(report)

    return dataclasses.replace(config, policy=found, verify=verify), explained, options


def worth_comparing(n_prompt: int) -> list[str]:
    """Three policies to compare on a prompt: as recommended, a quarter of that, and read within a budget.

    Of fewer than about 20,000 tokens budgets are smaller, so that something is evicted.
    """
    top_k = 4096
    while top_k > 16 and 16 * top_k > 3 * n_prompt:  # 4/3 of top_k are kept: at most a quarter
        top_k //= 2
    within = f"keydiff:budget={2 * top_k} then snapkv:top_k={top_k // 2}"
    return [f"snapkv:top_k={top_k}", f"snapkv:top_k={max(16, top_k // 4)}", within]
