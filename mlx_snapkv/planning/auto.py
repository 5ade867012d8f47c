"""The setting to use by default, for `policy="auto"`, `plan`, `compare` and `policies --choose`."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ..compress.options import Compress
from ..compress.policies import KeyDiff, SnapKV
from ..compress.policy import Policy
from ..errors import Option, SnapKVError
from ..sparse.options import Sparse
from ..sparse.prompt_caches import in_files
from .config import CompressionConfig
from .machine import this_machine
from .memory_plan import MemoryPlan, Planner
from .options import OPTIONS
from .prompt_plan import MAX_TOKENS
from .settings import AUTO, Setting, asks_for_auto
from .units import format_bytes

QUESTION, CONVERSATION, BATCH = "question", "conversation", "batch"


def _within(budget: int) -> CompressionConfig:
    return CompressionConfig(Compress(KeyDiff(budget=budget), SnapKV(top_k=budget // 4)))


KEEP_ALL = CompressionConfig()
SNAPKV = CompressionConfig(Compress(SnapKV(top_k=4096)))
SPARSE = CompressionConfig(Sparse(), store="memory")
SPARSE_4BIT = replace(SPARSE, store="4bit")
SPARSE_IN_FILES = replace(SPARSE, store="file")
SMALL_WINDOW = _within(8192)
MIN_TOKENS_TO_EVICT: int = 2 * SnapKV(top_k=4096).budget  # type: ignore[operator,assignment]  # tokens: less than half would be evicted
TYPICAL = 32_768  # tokens of the prompts to come, where none is known

# Candidates by task, from the best for the answer to the smallest. Later questions of a conversation may ask for any
# entry.
EVICTING = (SNAPKV, SMALL_WINDOW, *(_within(n) for n in (4096, 2048, 1024, 512)))
CANDIDATES = {
    QUESTION: (KEEP_ALL, *EVICTING, SPARSE_IN_FILES),
    CONVERSATION: (KEEP_ALL, SPARSE_4BIT, SPARSE_IN_FILES, *EVICTING),
    BATCH: EVICTING,
}
# Part of the usable memory that the full cache may take. Other programs need the rest.
COMFORTABLE = 0.75


@dataclass(frozen=True)
class AutoRequest:
    """The request that `policy="auto"` chooses a setting for.

    Attributes:
        n_prompt: tokens of the prompt; None if the prompts are not known yet.
        task: a key of `CANDIDATES`.
        options: the options of `RequestOptions` that the caller set.
        may_be_sparse: whether sparse attention can serve the request, as it has to if the caller set a store.
        kv_bits: bits of the entries kept; see `generate_step`.
        kv_memory: limit of the entries in bytes.
    """

    n_prompt: int | None
    task: str = QUESTION
    options: dict[str, Any] = field(default_factory=dict)
    may_be_sparse: bool = True
    kv_bits: int | None = None
    kv_memory: int | None = None

    def candidates(self) -> tuple[CompressionConfig, ...]:
        """Return the candidates, best first. A store that the caller set is for sparse attention."""
        if (store := self.options.get("store")) is not None:
            return (replace(SPARSE, store=store),)
        return tuple(
            config
            for config in CANDIDATES[self.task]
            if self.may_be_sparse or config.sparse is None
        )

    def completed(self, candidate: CompressionConfig) -> CompressionConfig:
        """Return a candidate with the request's own options. Raises: SnapKVError: options conflict."""
        own = {name: value for name, value in self.options.items() if name != "store"}
        if self.n_prompt is None and candidate == SNAPKV:
            return replace(
                SNAPKV, setting=Compress(SnapKV(top_k=4096, min_ctx=MIN_TOKENS_TO_EVICT)), **own
            )
        return replace(candidate, **own)


class Recommendation(NamedTuple):
    """A config for a request, the prompt's memory plan, and why the config is recommended.

    `fits` is false if no candidate fits; the config is then the one that takes the least memory.
    """

    config: CompressionConfig
    plan: MemoryPlan
    why: str
    fits: bool = True

    def __str__(self) -> str:
        return f"{AUTO}: {self.config}, because {self.why}"

    @property
    def keywords(self) -> dict[str, Any]:
        """Return the keywords of `generate_step` that ask for the config."""
        return {"policy": self.config.setting, **self.config.keywords}

    def explain(self, report: Any) -> None:
        """Note in a request's report what was chosen, and if it is the full cache, why."""
        report.auto = str(self)
        if self.config.setting is None:
            report.reason = self.why


def explaining(
    found: Recommendation | None, on_report: Callable[[Any], None] | None
) -> Callable[[Any], None]:
    """Return a callback that notes in a report what "auto" chose, if it was asked, and hands it to `on_report`."""

    def receive(report: Any) -> None:
        if found is not None:
            found.explain(report)
        if on_report is not None:
            on_report(report)

    return receive


@dataclass(frozen=True, eq=False)
class _Candidate:
    """A config that a request could have, and what it would take."""

    config: CompressionConfig
    plan: MemoryPlan
    kv_bytes: int

    def recommended(self, why: str, fits: bool = True) -> Recommendation:
        return Recommendation(self.config, self.plan, why, fits)


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
    spared = usable if n < MIN_TOKENS_TO_EVICT else int(COMFORTABLE * usable)

    def fits(x: _Candidate) -> bool:
        return (
            x.plan.peak <= (spared if x.config.setting is None else usable)
            and x.kv_bytes <= kv_most
        )

    fit = [x for x in candidates if fits(x)]
    if not fit:
        room = format_bytes(min(usable, kv_most))
        least = min(candidates, key=lambda x: max(x.plan.peak / usable, x.kv_bytes / kv_most))
        return least.recommended(f"no setting fits {room}, and it takes the least memory", False)
    best = fit[0]
    if best is first:
        return best.recommended(_why_first(first.config, n))
    of_kv, of_all = (first.kv_bytes, kv_most), (first.plan.peak, usable)
    need, limit = of_kv if first.kv_bytes > kv_most else of_all
    would = f"{first.config} would take {format_bytes(need)}"
    if need <= limit:
        return best.recommended(f"{would} of the {format_bytes(limit)} for models")
    return best.recommended(f"{would}, and {format_bytes(limit)} is available")


def _candidates(planner: Planner, request: AutoRequest, n: int) -> list[_Candidate]:
    """Return the settings that change how `n` tokens are read, and for few tokens the full cache; the best come first.

    Raises: SnapKVError: none can be combined with the request's options.
    """
    candidates = request.candidates() if planner.can_compress else ()
    found: list[_Candidate] = []
    refusal = None
    tried = candidates if candidates and n >= MIN_TOKENS_TO_EVICT else (KEEP_ALL, *candidates)
    for candidate in tried:
        try:
            config = request.completed(candidate)
            config.require(planner.model)
            plan, kv_bytes = planner.planned(n, config, request.kv_bits)
        except SnapKVError as error:
            refusal = error
            continue
        if config.setting is None or plan.reason is None:  # else it would change nothing
            found.append(_Candidate(config, plan, kv_bytes))
    if refusal is not None and not found:
        raise refusal
    return found


def _why_first(config: CompressionConfig, n: int) -> str:
    """Return why the first of the candidates for a prompt of `n` tokens is the best."""
    if config.setting is None and n < MIN_TOKENS_TO_EVICT:
        return f"at {n:,} tokens reading all entries costs little"
    if config.setting is None:
        return f"all entries of {n:,} tokens fit in memory"
    if config.sparse is None:
        return "the question chooses the entries that the answer needs from a long prompt"
    bits = re.search(r"(\d+)bit", config.store or "")
    where = "stay in files" if in_files(config.store) else "fit in memory"
    how = f" in {bits[1]} bits" if bits else ""
    return f"all entries {where}{how}, so that every token can choose which few it reads"


def resolve(
    model: Any,
    n_prompt: int | None,
    task: str,
    options: dict[str, Any],
    *,
    snapkv: Any = None,
    policy: Policy | Setting | str | None = None,
    sparse: Any = None,
    max_tokens: int = MAX_TOKENS,
    kv_memory: int | None = None,
) -> tuple[CompressionConfig, dict[str, Any], Recommendation | None]:
    """Return the config that the keywords ask for, mlx-lm's own options, and for "auto" the recommendation.

    Args:
        n_prompt: tokens of the prompt; None if the prompts are not known yet.
        options: the options of `RequestOptions`, and mlx-lm's own. With a caller's `prompt_cache` or a `draft_model`
            sparse attention is chosen only if `store` asks for it.
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
    CompressionConfig(**given)  # raises for invalid options
    own = (others.get(name) is None for name in ("prompt_cache", "draft_model"))
    request = AutoRequest(n_prompt, task, given, all(own), others.get("kv_bits"), kv_memory)
    how = {name: others[name] for name in ("prefill_step_size", "kv_group_size") if name in others}
    planner = Planner(model, max_tokens=min(max(0, max_tokens), TYPICAL), **how)
    found = recommended(planner, request, this_machine().usable)
    return found.config.beside(others), others, found


def worth_comparing(n_prompt: int) -> list[str]:
    """Return two policies to compare with sparse attention on a prompt: one that evicts once, one within a budget.

    Below about 20,000 tokens the budgets are smaller, so that something is evicted.
    """
    top_k = 4096
    while top_k > 16 and 16 * top_k > 3 * n_prompt:  # 4/3 of top_k are kept: at most a quarter
        top_k //= 2
    within = f"keydiff:budget={2 * top_k} then snapkv:top_k={top_k // 2}"
    return [f"snapkv:top_k={top_k}", within]
