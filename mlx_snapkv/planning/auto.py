"""Chooses a setting for `policy="auto"`, `plan`, `compare` and `policies --choose`."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
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
from .prompt_plan import MAX_TOKENS
from .settings import AUTO, Setting, asks_for_auto
from .speed_record import Speed, speed_of
from .units import format_bytes

QUESTION, CONVERSATION, BATCH = "question", "conversation", "batch"


def _within(budget: int) -> CompressionConfig:
    return CompressionConfig(Compress(KeyDiff(budget=budget), SnapKV(top_k=budget // 4)))


KEEP_ALL = CompressionConfig()
SNAPKV = CompressionConfig(Compress(SnapKV(top_k=4096)))
SPARSE = CompressionConfig(Sparse())
SPARSE_4BIT = CompressionConfig(Sparse(store="4bit"))
SPARSE_IN_FILES = CompressionConfig(Sparse(store="file"))
SMALL_WINDOW = _within(8192)
# Shorter prompts would lose less than half of their entries.
MIN_TOKENS_TO_EVICT: int = 2 * SnapKV(top_k=4096).budget  # type: ignore[operator,assignment]
TYPICAL = 32_768  # prompt length in tokens to assume if the prompts are not known yet

# Candidates for each task, from the best answers to the least memory. In a conversation, later questions may need any
# entry, so settings that keep all entries come first.
EVICTING = (SNAPKV, SMALL_WINDOW, *(_within(n) for n in (4096, 2048, 1024, 512)))
CANDIDATES = {
    QUESTION: (KEEP_ALL, *EVICTING, SPARSE_IN_FILES),
    CONVERSATION: (KEEP_ALL, SPARSE_4BIT, SPARSE_IN_FILES, *EVICTING),
    BATCH: EVICTING,
}
# Fraction of the usable memory that a request with a full cache may take. Other programs need the rest.
COMFORTABLE = 0.75
# Sparse attention must take less than this fraction of the full cache's time for a prompt and `MAX_TOKENS` more tokens.
MAX_TIME_RATIO = 0.95


@dataclass(frozen=True)
class AutoRequest:
    """A request for which `policy="auto"` chooses a setting.

    Attributes:
        n_prompt: prompt length in tokens. None if the prompts are not known yet.
        task: a key of `CANDIDATES`.
        may_be_sparse: whether sparse attention is possible. Ignored if `store` is set.
        store: the store that the user asked for, which requires sparse attention.
        kv_bits: bits per value of the kept entries; see `generate_step`.
        kv_memory: limit on the size of the entries in bytes.
        speed: this machine's speed record for sparse attention in memory.
    """

    n_prompt: int | None
    task: str = QUESTION
    may_be_sparse: bool = True
    store: str | None = None
    kv_bits: int | None = None
    kv_memory: int | None = None
    speed: Speed = field(default_factory=Speed)

    def candidates(self, n_prompt: int = 0) -> tuple[CompressionConfig, ...]:
        """Return the candidates for a prompt, best first. If `store` is set, the only one is sparse attention."""
        if self.store is not None:
            return (CompressionConfig(Sparse(store=self.store)),)
        configs = CANDIDATES[self.task]
        if configs[0] == KEEP_ALL and self.sparse_share(n_prompt) < MAX_TIME_RATIO:
            configs = (SPARSE, *configs)
        return tuple(config for config in configs if self.may_be_sparse or config.sparse is None)

    def sparse_share(self, n_prompt: int) -> float:
        """Return the predicted time with sparse attention, as a fraction of the full cache's time on this machine.

        Return infinity if there are no measurements.
        """
        predicted = self.speed.seconds(n_prompt, MAX_TOKENS)
        return math.inf if predicted is None else predicted[0] / predicted[1]

    def completed(self, candidate: CompressionConfig) -> CompressionConfig:
        """Return the candidate, with a minimum prompt length for SnapKV if the prompts are not known yet."""
        if self.n_prompt is None and candidate == SNAPKV:
            # The prompts may turn out to be short, and short prompts have little to evict.
            long_only = Compress(SnapKV(top_k=4096, min_ctx=MIN_TOKENS_TO_EVICT))
            return CompressionConfig(long_only)
        return candidate


class Recommendation(NamedTuple):
    """A recommended config, with the prompt's memory plan and the reason.

    If no candidate fits, `fits` is False and the config is the one that takes the least memory.
    """

    config: CompressionConfig
    plan: MemoryPlan
    why: str
    fits: bool = True

    def __str__(self) -> str:
        """Return "auto: CONFIG, because WHY", to show to users."""
        return f"{AUTO}: {self.config}, because {self.why}"

    def explain(self, report: Any) -> None:
        """Add the recommendation to a request's report. If it is the full cache, also set the report's `reason`."""
        report.auto = str(self)
        if self.config.setting is None:
            report.reason = self.why


def explaining(
    recommendation: Recommendation | None, on_report: Callable[[Any], None] | None
) -> Callable[[Any], None]:
    """Wrap `on_report` so that the recommendation, if there is one, is added to the report first."""

    def receive(report: Any) -> None:
        if recommendation is not None:
            recommendation.explain(report)
        if on_report is not None:
            on_report(report)

    return receive


@dataclass(frozen=True, eq=False)
class _Candidate:
    """A possible config for a request, and the memory that it would take.

    Attributes:
        kv_bytes: peak size of the entries in bytes.
    """

    config: CompressionConfig
    plan: MemoryPlan
    kv_bytes: int

    def recommendation(self, why: str, fits: bool = True) -> Recommendation:
        return Recommendation(config=self.config, plan=self.plan, why=why, fits=fits)


def recommend(planner: Planner, request: AutoRequest, usable: int) -> Recommendation:
    """Recommend the best setting for the task that fits in `usable` bytes.

    Short prompts get the full cache. Longer prompts get it only if it leaves enough memory for other programs, and if
    sparse attention is not known to be clearly faster on this machine.

    Raises: SnapKVError: the model supports none of the candidates.
    """
    n_prompt = request.n_prompt or min(TYPICAL, planner.trained_length or TYPICAL)
    candidates = _candidates(planner, request, n_prompt)
    best = candidates[0]
    if not planner.can_compress:
        return best.recommendation("this model's entries can't be compressed")
    kv_limit = usable if request.kv_memory is None else request.kv_memory
    is_short = n_prompt < MIN_TOKENS_TO_EVICT
    full_cache_limit = usable if is_short else int(COMFORTABLE * usable)

    def fits(candidate: _Candidate) -> bool:
        config = candidate.config
        is_larger = config.store == "memory" and request.store is None
        peak_limit = full_cache_limit if config.setting is None or is_larger else usable
        return candidate.plan.peak <= peak_limit and candidate.kv_bytes <= kv_limit

    chosen = next((candidate for candidate in candidates if fits(candidate)), None)
    if chosen is None:
        smallest = min(candidates, key=lambda x: max(x.plan.peak / usable, x.kv_bytes / kv_limit))
        limit = format_bytes(min(usable, kv_limit))
        why = f"no setting fits {limit}, and it takes the least memory"
        return smallest.recommendation(why, fits=False)
    if chosen is best:
        return best.recommendation(_why_best(best.config, n_prompt, request))
    return chosen.recommendation(_why_not_best(best, usable, kv_limit))


def _candidates(planner: Planner, request: AutoRequest, n_prompt: int) -> list[_Candidate]:
    """Return the candidates that would change how a prompt is read, best first.

    For short prompts, the full cache comes before all others.

    Raises: SnapKVError: the model supports none of the candidates.
    """
    configs = request.candidates(n_prompt) if planner.can_compress else ()
    if not configs or n_prompt < MIN_TOKENS_TO_EVICT:
        configs = (KEEP_ALL, *configs)
    candidates: list[_Candidate] = []
    refusal = None
    for config in configs:
        try:
            completed = request.completed(config)
            completed.require(planner.model)
            plan, kv_bytes = planner.memory_and_peak(n_prompt, completed, request.kv_bits)
        except SnapKVError as error:
            refusal = error
            continue
        would_change_nothing = completed.setting is not None and plan.reason is not None
        if not would_change_nothing:
            candidates.append(_Candidate(completed, plan, kv_bytes))
    if refusal is not None and not candidates:
        raise refusal
    return candidates


def _why_best(config: CompressionConfig, n_prompt: int, request: AutoRequest) -> str:
    """Explain why `config`, the first candidate for a prompt of `n_prompt` tokens, is the best."""
    if config.setting is None and n_prompt < MIN_TOKENS_TO_EVICT:
        return f"at {n_prompt:,} tokens reading all entries costs little"
    if config.setting is None:
        return f"all entries of {n_prompt:,} tokens fit in memory"
    if config.sparse is None:
        return "the question chooses the entries that the answer needs from a long prompt"
    share = request.sparse_share(n_prompt)
    if config.store == "memory" and share < MAX_TIME_RATIO:
        return (
            f"on this machine {n_prompt:,} tokens and {MAX_TOKENS} of the answer take about {share:.0%} of the full "
            "cache's time"
        )
    where = "stay in files" if in_files(config.store) else "fit in memory"
    bits = re.search(r"(\d+)bit", config.store or "")
    if bits is not None:
        where += f" in {bits[1]} bits"
    return f"all entries {where}, so that every token can choose which few it reads"


def _why_not_best(best: _Candidate, usable: int, kv_limit: int) -> str:
    """Explain why the best candidate is not recommended: how much memory it would take, and how much there is."""
    if best.kv_bytes > kv_limit:
        need, limit = best.kv_bytes, kv_limit
    else:
        need, limit = best.plan.peak, usable
    would_take = f"{best.config} would take {format_bytes(need)}"
    if need <= limit:  # it fits, but leaves too little for other programs
        return f"{would_take} of the {format_bytes(limit)} for models"
    return f"{would_take}, and {format_bytes(limit)} is available"


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
    store: str | None = None,
) -> tuple[CompressionConfig, dict[str, Any], Recommendation | None]:
    """Resolve keyword arguments to a config, mlx-lm's options and, for "auto", the recommendation.

    Args:
        model: an mlx-lm model. "auto" considers its shapes and trained length.
        n_prompt: prompt length in tokens. None if the prompts are not known yet.
        task: the task for which "auto" chooses, such as `QUESTION`.
        options: mlx-lm's options. With a `prompt_cache` or a `draft_model`, "auto" does not choose sparse attention
            unless `store` is set.
        snapkv: see `generate_step`.
        policy: see `generate_step`; "auto" is allowed.
        sparse: see `generate_step`.
        max_tokens: maximum answer length in tokens.
        kv_memory: limit on the size of the entries in bytes, for "auto".
        store: restricts "auto" to sparse attention with this store.

    Raises: SnapKVError: an option is invalid or conflicts with another one.
    """
    if not asks_for_auto(snapkv, policy):
        methods: dict[str, Any] = {"snapkv": snapkv, "policy": policy, "sparse": sparse}
        config, mlx_options = CompressionConfig.from_keywords(options | methods)
        return config, mlx_options, None
    if sparse is not None:
        raise SnapKVError(
            "{} chooses how entries are used, and so does {}: give only one of them",
            Option("policy", "auto"),
            Option("sparse"),
        )
    _, mlx_options = CompressionConfig.from_keywords(options)
    request = AutoRequest(
        n_prompt=n_prompt,
        task=task,
        may_be_sparse=(
            mlx_options.get("prompt_cache") is None and mlx_options.get("draft_model") is None
        ),
        store=store,
        kv_bits=mlx_options.get("kv_bits"),
        kv_memory=kv_memory,
        speed=speed_of(model, Sparse()),
    )
    planner_options = {
        name: mlx_options[name]
        for name in ("prefill_step_size", "kv_group_size")
        if name in mlx_options
    }
    n_answer = min(max(0, max_tokens), TYPICAL)  # -1 (no limit) is planned as 0
    planner = Planner(model, max_tokens=n_answer, **planner_options)
    recommendation = recommend(planner, request, this_machine().usable)
    config = recommendation.config.with_mlx_options(mlx_options)
    return config, mlx_options, recommendation


def worth_comparing(n_prompt: int) -> list[str]:
    """Return two policies to compare with sparse attention: one that evicts once, and one with a fixed budget.

    For prompts below about 20,000 tokens, the budgets are reduced so that some entries are evicted.
    """
    top_k = 4096
    # SnapKV keeps 4/3 of top_k, and that should be at most a quarter of the prompt.
    while top_k > 16 and 16 * top_k > 3 * n_prompt:
        top_k //= 2
    evicting_once = f"snapkv:top_k={top_k}"
    within_budget = f"keydiff:budget={2 * top_k} then snapkv:top_k={top_k // 2}"
    return [evicting_once, within_budget]
