"""Which setting to use by default: one answer for `policy="auto"`, `plan`, `compare` and `policies --choose`."""

import dataclasses
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..caches.stored_caches import in_files
from ..errors import Option, SnapKVError
from ..policies import (
    AUTO,
    Policy,
    SnapKV,
    Stages,
    asks_for_auto,
    method_named,
)
from .config import CompressionConfig
from .machine import this_machine
from .memory_plan import MemoryPlan, Planner
from .options import OPTIONS
from .prompt_plan import MAX_TOKENS
from .units import format_bytes

QUESTION, CONVERSATION, BATCH = "question", "conversation", "batch"


class Setting(NamedTuple):
    """A policy, or sparse attention and where it keeps all entries, as reports name it; None for the full cache."""

    method: str | None
    store: str | None = None

    @property
    def chosen(self) -> Any:
        """The policy or sparse attention itself."""
        return None if self.method is None else method_named(self.method)

    @property
    def is_sparse(self) -> bool:
        return self.method is not None and not self.chosen.evicts

    def __str__(self) -> str:
        store = "" if self.store in (None, "memory") else f", store {self.store}"
        return f"{self.method or 'the full cache'}{store}"

    @property
    def flags(self) -> str:
        """The same as options of a command; none for the full cache."""
        if self.method is None:
            return ""
        flag, text = "--policy", self.method
        if self.is_sparse:
            flag, text = "--sparse", self.method.partition(":")[2] or "read=sparse"  # as by default
        store = "" if self.store in (None, "memory") else f" --store {self.store}"
        return f"{flag} {shlex.quote(text)}{store}"


def _within(budget: int) -> Setting:
    return Setting(f"keydiff:budget={budget} then snapkv:top_k={budget // 4}")


FULL = Setting(None)
SNAPKV = Setting("snapkv:top_k=4096")
SPARSE = Setting("sparse", "memory")
PACKED = SPARSE._replace(store="4bit")
FILED = SPARSE._replace(store="file")
SMALL = _within(8192)
FEW: int = 2 * SnapKV(top_k=4096).budget  # type: ignore[operator,assignment]  # tokens: less than half would be evicted
TYPICAL = 32_768  # tokens of the prompts to come, where none is known

# By task, from the best for the answer to the smallest. Later questions of a conversation may ask for any entry.
EVICTING = (SNAPKV, SMALL, *(_within(n) for n in (4096, 2048, 1024, 512)))
SETTINGS = {
    QUESTION: (FULL, *EVICTING, FILED),
    CONVERSATION: (FULL, PACKED, FILED, *EVICTING),
    BATCH: EVICTING,
}
# Part of the usable memory that the full cache may take: other programs need memory, too.
COMFORTABLE = 0.75


@dataclass(frozen=True)
class AutoRequest:
    """What `policy="auto"` chooses a setting for.

    Attributes:
        n_prompt: tokens of the prompt; None if the prompts are not known yet.
        task: one of `SETTINGS`.
        options: those of `RequestOptions` that the caller set.
        may_be_sparse: whether sparse attention can serve the request, as it has to if the caller set a store.
        kv_bits: of the entries, as of `generate_step`.
        kv_memory: limit of the entries in bytes.
    """

    n_prompt: int | None
    task: str = QUESTION
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    may_be_sparse: bool = True
    kv_bits: int | None = None
    kv_memory: int | None = None

    def settings(self) -> tuple[Setting, ...]:
        """The candidates, best first. A store that the caller set is for sparse attention."""
        if (store := self.options.get("store")) is not None:
            return (SPARSE._replace(store=store),)
        return tuple(s for s in SETTINGS[self.task] if self.may_be_sparse or not s.is_sparse)

    def config(self, setting: Setting) -> CompressionConfig:
        """How a request is compressed by a setting. Raises: SnapKVError: options conflict."""
        if setting.method is None:
            return CompressionConfig(**self.options | {"store": None})
        found = setting.chosen
        if self.n_prompt is None and isinstance(found, SnapKV):
            found = dataclasses.replace(found, min_ctx=FEW)
        return CompressionConfig(found, **self.options | {"store": setting.store})


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

    @property
    def keywords(self) -> dict[str, Any]:
        """Those of `generate_step` that it stands for."""
        return {"policy": self.config.policy, **self.config.keywords}

    def explain(self, report: Any) -> None:
        """Let a request's report tell what was taken, and why nothing was compressed if that is the reason."""
        report.auto = str(self)
        if self.config.policy is None:
            report.reason = self.why


def explaining(
    found: Recommendation | None, on_report: Callable[[Any], None] | None
) -> Callable[[Any], None]:
    """What receives a request's report: `on_report`, once it tells what "auto" has taken, if that was asked."""

    def receive(report: Any) -> None:
        if found is not None:
            found.explain(report)
        if on_report is not None:
            on_report(report)

    return receive


@dataclass(frozen=True, eq=False)
class _Candidate:
    """A setting that a request could have, and what it would take."""

    setting: Setting
    config: CompressionConfig
    plan: MemoryPlan
    kv_bytes: int

    def recommended(self, why: str, fits: bool = True) -> Recommendation:
        return Recommendation(self.setting, self.config, self.plan, why, fits)


def recommended(planner: Planner, request: AutoRequest, usable: int) -> Recommendation:
    """Return the best setting for the task that fits in `usable` bytes.

    For few tokens that is the full cache. For more it is the full cache only if that leaves memory to spare.

    Raises: SnapKVError: no setting can be combined with the request's options.
    """
    n = request.n_prompt or min(TYPICAL, planner.trained_length or TYPICAL)
    candidates = _candidates(planner, request, n)
    first = candidates[0]
    if not planner.can_compress:
        return first.recommended("this model's entries can't be compressed")
    kv_most = usable if request.kv_memory is None else request.kv_memory
    spared = usable if n < FEW else int(COMFORTABLE * usable)

    def fits(x: _Candidate) -> bool:
        return x.plan.peak <= (spared if x.setting is FULL else usable) and x.kv_bytes <= kv_most

    fit = [x for x in candidates if fits(x)]
    if not fit:
        room = format_bytes(min(usable, kv_most))
        least = min(candidates, key=lambda x: max(x.plan.peak / usable, x.kv_bytes / kv_most))
        return least.recommended(f"no setting fits {room}, and it takes the least memory", False)
    best = fit[0]
    if best is first:
        return best.recommended(_why_first(first.setting, n))
    of_kv, of_all = (first.kv_bytes, kv_most), (first.plan.peak, usable)
    need, limit = of_kv if first.kv_bytes > kv_most else of_all
    would = f"{first.setting} would take {format_bytes(need)}"
    if need <= limit:
        return best.recommended(f"{would} of the {format_bytes(limit)} for models")
    return best.recommended(f"{would}, and {format_bytes(limit)} is available")


def _candidates(planner: Planner, request: AutoRequest, n: int) -> list[_Candidate]:
    """The settings that would do something to a prompt of `n` tokens, and for few tokens the full cache; best first.

    Raises: SnapKVError: none can be combined with the request's options.
    """
    settings = request.settings() if planner.can_compress else ()
    found: list[_Candidate] = []
    refusal = None
    tried = settings if settings and n >= FEW else (FULL, *settings)
    for setting in tried:
        try:
            config = request.config(setting)
            config.require(planner.model)
            plan, kv_bytes = planner.planned(n, config, request.kv_bits)
        except SnapKVError as error:
            refusal = error
            continue
        if setting.method is None or plan.reason is None:  # else it would change nothing
            found.append(_Candidate(setting, config, plan, kv_bytes))
    if refusal is not None and not found:
        raise refusal
    return found


def _why_first(setting: Setting, n: int) -> str:
    """Why the first of the candidates for a prompt of `n` tokens is the best."""
    if setting is FULL and n < FEW:
        return f"at {n:,} tokens reading all entries costs little"
    if setting is FULL:
        return f"all entries of {n:,} tokens fit in memory"
    if not setting.is_sparse:
        return "the question chooses the entries that the answer needs from a long prompt"
    bits = re.search(r"(\d+)bit", setting.store or "")
    where = "stay in files" if in_files(setting.store) else "fit in memory"
    how = f" in {bits[1]} bits" if bits else ""
    return f"all entries {where}{how}, so that every token can choose which few it reads"


def resolve(
    model: Any,
    n_prompt: int | None,
    task: str,
    options: dict[str, Any],
    *,
    snapkv: Any = None,
    policy: Policy | Stages | str | None = None,
    sparse: Any = None,
    max_tokens: int = MAX_TOKENS,
    kv_memory: int | None = None,
) -> tuple[CompressionConfig, dict[str, Any], Recommendation | None]:
    """The config that an entry point's keywords ask for, and mlx-lm's own options; for "auto" the recommendation too.

    Args:
        n_prompt: tokens of the prompt; None if the prompts are not known yet.
        options: those of `RequestOptions`, and mlx-lm's. With a caller's `prompt_cache` or a `draft_model`
            the answer needs entries in memory, so none are put in files unless `store` says so.
        kv_memory: limit of the entries in bytes.

    Raises: SnapKVError: an option is invalid or conflicts with another.
    """
    if not asks_for_auto(snapkv, policy):
        how: dict[str, Any] = {"snapkv": snapkv, "policy": policy, "sparse": sparse}
        return *CompressionConfig.taken_from(options | how), None
    if sparse is not None:
        raise SnapKVError(
            "{} chooses how entries are used, and so does {}: give only one of them",
            Option("policy", "auto"),
            Option("sparse"),
        )
    given = {name: options[name] for name in OPTIONS if name in options}
    others = {name: value for name, value in options.items() if name not in OPTIONS}
    CompressionConfig(**given)  # which finds mistakes
    own = (others.get(name) is None for name in ("prompt_cache", "draft_model"))
    request = AutoRequest(n_prompt, task, given, all(own), others.get("kv_bits"), kv_memory)
    how = {name: others[name] for name in ("prefill_step_size", "kv_group_size") if name in others}
    planner = Planner(model, max_tokens=min(max(0, max_tokens), TYPICAL), **how)
    found = recommended(planner, request, this_machine().usable)
    return found.config.beside(others), others, found


def worth_comparing(n_prompt: int) -> list[str]:
    """Two policies to compare on a prompt, beside sparse attention: one that chooses once, and one that reads within a
    budget.

    Below about 20,000 tokens the budgets are smaller, so that something is evicted.
    """
    top_k = 4096
    while top_k > 16 and 16 * top_k > 3 * n_prompt:  # 4/3 of top_k are kept: at most a quarter
        top_k //= 2
    within = f"keydiff:budget={2 * top_k} then snapkv:top_k={top_k // 2}"
    return [f"snapkv:top_k={top_k}", within]
