"""Which setting to use by default: one answer for `policy="auto"`, `plan`, `compare` and `policies --choose`."""

import dataclasses
import shlex
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..caches.memories import in_files
from ..errors import SnapKVError
from ..policies import AUTO, Policy, SnapKV, Stages, asks_for_auto, resolve_policy
from .config import RETENTION, CompressionConfig
from .machine import this_machine
from .plan import MAX_TOKENS, MemoryPlan, Planner
from .units import format_bytes

QUESTION, CONVERSATION, BATCH = "question", "conversation", "batch"


class Setting(NamedTuple):
    """A policy as it is typed, or None for the full cache, and what becomes of the entries that it does not keep."""

    policy: str | None
    memory: str = "drop"

    def __str__(self) -> str:
        memory = "" if self.memory == "drop" else f", memory={self.memory}"
        return f"{self.policy or 'the full cache'}{memory}"

    @property
    def flags(self) -> str:
        """The same as options of a command; none for the full cache."""
        memory = "" if self.memory == "drop" else f" --memory {self.memory}"
        return f"--policy {shlex.quote(self.policy)}{memory}" if self.policy else ""


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
    QUESTION: "the question chooses the entries that the answer needs from a long prompt",
    CONVERSATION: "every token chooses again from all entries, and reads few",
    BATCH: "small caches are decoded together",
}


@dataclass(frozen=True)
class AutoRequest:
    """What `policy="auto"` chooses a setting for.

    Attributes:
        n_prompt: tokens of the prompt; None if the prompts are not known yet.
        task: one of `SETTINGS`.
        retention: `memory`, `verify`, `refresh` and `far` as of `generate_step`, where the caller set them; with "drop"
            any memory may be chosen.
        may_retain: whether a memory that recalls may be chosen if the caller set none.
        kv_bits: of the entries, as of `generate_step`.
        kv_memory: limit of the entries in bytes.
    """

    n_prompt: int | None
    task: str = QUESTION
    retention: dict[str, Any] = dataclasses.field(default_factory=dict)
    may_retain: bool = True
    kv_bits: int | None = None
    kv_memory: int | None = None

    def settings(self, is_far: bool) -> tuple[Setting, ...]:
        """The candidates, best first. Verified answers and a memory that the caller set need all entries."""
        memory, verify = self.retention.get("memory", "drop"), self.retention.get("verify")
        if memory == "drop" and verify is None:
            found = SETTINGS[self.task]
            books = SETTINGS[CONVERSATION][1:] if is_far and self.may_retain else ()
            return (found[0], *books, *found[1:]) if self.task == QUESTION else found
        found = SETTINGS[CONVERSATION]
        if memory != "drop":
            return tuple(setting._replace(memory=memory) for setting in found)
        return tuple(s._replace(memory=s.memory.replace(":file", "")) for s in found)

    def config(self, setting: Setting, is_far: bool) -> CompressionConfig:
        """How a request is compressed by a setting. Raises: SnapKVError: options conflict."""
        if setting.policy is None:  # whose answers are what others are verified by
            return CompressionConfig(far=self.retention.get("far") if is_far else None)
        found = resolve_policy(policy=setting.policy)
        if self.n_prompt is None and isinstance(found, SnapKV):
            found = dataclasses.replace(found, min_ctx=FEW)
        return CompressionConfig(found, **self.retention | {"memory": setting.memory})


class Recommendation(NamedTuple):
    """A setting, the config it gives a request, the prompt's memory plan, and why the setting is recommended.

    `fits` is false if no setting fits; the setting is then the one that takes the least memory.
    """

    setting: Setting
    config: CompressionConfig
    plan: MemoryPlan
    why: str
    fits: bool = True

    def __str__(self) -> str:
        return f"{AUTO}: {self.setting}, because {self.why}"


def recommended(planner: Planner, request: AutoRequest, usable: int) -> Recommendation:
    """The best setting that fits in `usable` bytes: the full cache for few tokens, else the best for the task.

    Raises: SnapKVError: no setting can be combined with the request's options.
    """
    n = request.n_prompt or min(TYPICAL, planner.trained_length or TYPICAL)
    is_far = n > (planner.trained_length or n)
    few = n < FEW or not planner.can_compress
    settings = request.settings(is_far) if planner.can_compress else ()
    possible = _possible(planner, request, (FULL, *settings) if few else settings, is_far)
    found = {
        setting: planner.planned(n, config, request.kv_bits) for setting, config in possible.items()
    }
    kv_most = usable if request.kv_memory is None else request.kv_memory
    fit = [s for s, (plan, kv) in found.items() if plan.peak <= usable and kv <= kv_most]

    def recommend(setting: Setting, why: str, fits: bool = True) -> Recommendation:
        return Recommendation(setting, possible[setting], found[setting][0], why, fits)

    if not planner.can_compress:
        return recommend(FULL, "this model's entries can't be compressed")
    ordered = list(found)
    first, last = ordered[0], ordered[-1]
    if not fit:
        room = format_bytes(min(usable, kv_most))
        return recommend(last, f"no setting fits {room}, and it takes the least memory", False)
    best = next((s for s in fit if found[s][0].beyond is None), fit[0])
    if best is not first and first in fit:
        return recommend(best, _nearer(best))
    if best is not first:
        plan, kv = found[first]
        need, limit = (kv, kv_most) if kv > kv_most else (plan.peak, usable)
        why = f"{first} would take {format_bytes(need)}, and {format_bytes(limit)} is available"
    elif first is FULL:
        why = f"fewer than half of {n:,} entries would be evicted"
    else:
        why = WHY[CONVERSATION if first.memory != "drop" else request.task]
    return recommend(best, why)


def _possible(
    planner: Planner, request: AutoRequest, settings: tuple[Setting, ...], is_far: bool
) -> dict[Setting, CompressionConfig]:
    """The settings that the request can be combined with, and their configs. SnapKVError, the last one's, if none."""
    found, refusal = {}, None
    for setting in settings:
        try:
            config = request.config(setting, is_far)
            config.require(planner.model)
            found[setting] = config
        except SnapKVError as error:
            refusal = error
    if refusal is not None and not found:
        raise refusal
    return found


def _nearer(setting: Setting) -> str:
    why = "it evicts while it reads, which keeps distances within the model's trained length"
    if setting.memory == "drop":
        return why
    where = "files" if in_files(setting.memory) else "memory"
    return f"{why}, and the evicted entries stay in {where} for the answer to choose from"


def resolve(
    model: Any,
    n_prompt: int | None,
    task: str,
    options: dict[str, Any],
    *,
    snapkv: Any = None,
    policy: Policy | Stages | str | None = None,
    max_tokens: int = MAX_TOKENS,
    kv_memory: int | None = None,
) -> tuple[CompressionConfig, dict[str, Any], Recommendation | None]:
    """The config that an entry point's keywords ask for, and mlx-lm's own options; for "auto" the recommendation too.

    Args:
        n_prompt: tokens of the prompt; None if the prompts are not known yet.
        options: `memory`, `verify`, `refresh`, `far`, and mlx-lm's. With a caller's `prompt_cache` or a `draft_model`
            the answer needs entries in memory, so none are put in files unless `memory` says so.
        kv_memory: limit of the entries in bytes.

    Raises: SnapKVError: an option is invalid or conflicts with another.
    """
    if not asks_for_auto(snapkv, policy):
        config, others = CompressionConfig.taken_from(options, resolve_policy(snapkv, policy))
        return config, others, None
    retention = {name: options[name] for name in RETENTION if name in options}
    others = {name: value for name, value in options.items() if name not in RETENTION}
    require_for_auto(retention)
    own = (others.get(name) is None for name in ("prompt_cache", "draft_model"))
    request = AutoRequest(n_prompt, task, retention, all(own), others.get("kv_bits"), kv_memory)
    how = {name: others[name] for name in ("prefill_step_size", "kv_group_size") if name in others}
    planner = Planner(model, max_tokens=min(max(0, max_tokens), TYPICAL), **how)
    found = recommended(planner, request, this_machine().usable)
    return found.config, others, found


def require_for_auto(retention: dict[str, Any]) -> None:
    """Raises: SnapKVError: an option of retention is invalid, or none of the settings could have it."""
    leaves_open = retention.get("memory", "drop") == "drop" and retention.get("verify") is not None
    CompressionConfig(**retention | ({"memory": "recall"} if leaves_open else {}))


def worth_comparing(n_prompt: int) -> list[str]:
    """Three policies to compare on a prompt: the recommended one, a quarter of it, and one that reads within a budget.

    Below about 20,000 tokens the budgets are smaller, so that something is evicted.
    """
    top_k = 4096
    while top_k > 16 and 16 * top_k > 3 * n_prompt:  # 4/3 of top_k are kept: at most a quarter
        top_k //= 2
    within = f"keydiff:budget={2 * top_k} then snapkv:top_k={top_k // 2}"
    return [f"snapkv:top_k={top_k}", f"snapkv:top_k={max(16, top_k // 4)}", within]
