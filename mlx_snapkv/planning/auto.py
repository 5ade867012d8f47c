"""Chooses a setting for `policy="auto"` and for `plan`, and suggests policies to compare."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..compress.options import Compress
from ..compress.policies import KeyDiff, SnapKV
from ..compress.policy import Policy
from ..errors import Option, SnapKVError
from ..sparse.options import Sparse
from ..sparse.prompt_caches import in_files
from ..sparse.stores import STORES
from .config import CompressionConfig
from .machine import this_machine
from .memory_plan import MemoryPlan, Planner, planner_options
from .prompt_plan import MAX_TOKENS
from .settings import AUTO, Setting, asks_for_auto
from .speed_record import Speed, speed_of
from .units import format_bytes

QUESTION, CONVERSATION, BATCH = "question", "conversation", "batch"


def _evicting_within(budget: int) -> CompressionConfig:
    """Return a config that evicts down to `budget` entries during prefill.

    After prefill, it evicts once more, down to about a third of `budget`.
    """
    return CompressionConfig(Compress(KeyDiff(budget=budget), SnapKV(top_k=budget // 4)))


KEEP_ALL = CompressionConfig()
SNAPKV = CompressionConfig(Compress(SnapKV(top_k=4096)))
SPARSE = CompressionConfig(Sparse())
SPARSE_8BIT = CompressionConfig(Sparse(store="8bit"))
SPARSE_IN_FILES = CompressionConfig(Sparse(store="file"))
SMALL_BUDGET = _evicting_within(8192)
# Minimum prompt length in tokens at which `SNAPKV` evicts at least half of the entries.
MIN_TOKENS_TO_EVICT: int = 2 * SnapKV(top_k=4096).budget  # type: ignore[operator,assignment]
TYPICAL_PROMPT = 32_768  # prompt length in tokens to assume if the prompts are not known yet

SMALL_BUDGETS = (SMALL_BUDGET, *map(_evicting_within, (4096, 2048, 1024, 512)))
EVICTING = (SNAPKV, *SMALL_BUDGETS)
# Candidates for each task, best first. KeyDiff evicts before the model has read the question, so entries in 8 bits come
# first. In a conversation, later questions may need any entry, so all settings that keep all entries come first.
CANDIDATES = {
    QUESTION: (KEEP_ALL, SNAPKV, SPARSE_8BIT, *SMALL_BUDGETS, SPARSE_IN_FILES),
    CONVERSATION: (KEEP_ALL, SPARSE_8BIT, SPARSE_IN_FILES, *EVICTING),
    BATCH: EVICTING,
}
# A long prompt gets the full cache only if the peak memory, including the weights, is at most this fraction of the
# usable memory. The rest is left to other programs.
FULL_CACHE_SHARE = 0.75
# Sparse attention is preferred to the full cache only if `MAX_TOKENS` answer tokens, including the index, take less
# than this fraction of the full cache's time.
MAX_TIME_RATIO = 0.95


@dataclass(frozen=True)
class AutoRequest:
    """A request that `policy="auto"` chooses a setting for.

    Attributes:
        n_prompt: prompt length in tokens. None if the prompts are not known yet.
        task: a key of `CANDIDATES`.
        may_be_sparse: whether "auto" may choose sparse attention.
        required_sparse: the sparse-attention setting that the user requires, or None. If it is set, `may_be_sparse` has
            no effect.
        kv_bits: bits per value of the kept entries; see `generate_step`.
        kv_memory: KV memory limit in bytes. None for no limit.
        speed: this machine's speed record for sparse attention with store="memory".
    """

    n_prompt: int | None
    task: str = QUESTION
    may_be_sparse: bool = True
    required_sparse: Sparse | None = None
    kv_bits: int | None = None
    kv_memory: int | None = None
    speed: Speed = field(default_factory=Speed)

    def candidates(self, n_prompt: int = 0) -> tuple[CompressionConfig, ...]:
        """Return the candidates for a prompt, best first.

        If the user requires a sparse-attention setting, this setting is the only candidate.
        """
        if self.required_sparse is not None:
            return (CompressionConfig(self.required_sparse),)
        configs = CANDIDATES[self.task]
        prefers_all_entries = configs[0] == KEEP_ALL
        if prefers_all_entries and self.sparse_time_ratio(n_prompt) < MAX_TIME_RATIO:
            configs = (SPARSE, *configs)
        if self.may_be_sparse:
            return configs
        return tuple(config for config in configs if config.sparse is None)

    def sparse_time_ratio(self, n_prompt: int) -> float:
        """Predict how long an answer takes with sparse attention, as a fraction of its time with the full cache.

        The prediction is for this machine. Return infinity if measurements are missing.
        """
        predicted = self.speed.predict_seconds(n_prompt, MAX_TOKENS)
        return math.inf if predicted is None else predicted.sparse / predicted.full

    def with_min_ctx(self, candidate: CompressionConfig) -> CompressionConfig:
        """Return the candidate, with a minimum prompt length if it is `SNAPKV` and the prompts are not known yet."""
        if self.n_prompt is None and candidate == SNAPKV:
            # The prompts may turn out to be short, with little to evict.
            for_long_prompts = Compress(SnapKV(top_k=4096, min_ctx=MIN_TOKENS_TO_EVICT))
            return CompressionConfig(for_long_prompts)
        return candidate


class Recommendation(NamedTuple):
    """A recommended config, the prompt's memory plan, and the reason for the choice.

    If no candidate fits, `fits` is False and the config is the one that takes the least memory.
    """

    config: CompressionConfig
    plan: MemoryPlan
    why: str
    fits: bool = True

    def __str__(self) -> str:
        """Return "auto: CONFIG, because WHY", to show to users."""
        return f"{AUTO}: {self.config}, because {self.why}"


def explaining(
    recommendation: Recommendation | None, on_report: Callable[[Any], None] | None
) -> Callable[[Any], None]:
    """Return a callback that adds the recommendation, if any, to a report and passes the report to `on_report`.

    If the full cache is recommended, the callback also sets the report's `reason`.
    """

    def explain_and_report(report: Any) -> None:
        if recommendation is not None:
            report.auto = str(recommendation)
            if recommendation.config.setting is None:
                report.reason = recommendation.why
        if on_report is not None:
            on_report(report)

    return explain_and_report


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
    """Recommend the best of the request's candidates that fit in `usable` bytes and the request's KV memory limit.

    If none fits, recommend the one that takes the least memory. A short prompt gets the full cache if the cache fits. A
    longer prompt gets the full cache only if that leaves enough memory for other programs. Even then, sparse attention
    is preferred if it is allowed and its answers are known to be clearly faster on this machine. A model that can't be
    compressed always gets the full cache.

    Raises: SnapKVError: the model supports none of the candidates.
    """
    n_prompt = request.n_prompt or min(TYPICAL_PROMPT, planner.trained_length or TYPICAL_PROMPT)
    candidates = _candidates(planner, request, n_prompt)
    best = candidates[0]
    if not planner.can_compress:
        return best.recommendation("this model's entries can't be compressed")
    kv_limit = usable if request.kv_memory is None else request.kv_memory
    is_short = n_prompt < MIN_TOKENS_TO_EVICT
    full_cache_limit = usable if is_short else int(FULL_CACHE_SHARE * usable)

    def fits(candidate: _Candidate) -> bool:
        """Return whether a candidate fits.

        If the prompt is long, a full cache must leave memory for other programs. The same applies to sparse attention
        with store="memory", unless the user explicitly asked for sparse attention.
        """
        config = candidate.config
        is_optional = request.required_sparse is None
        keeps_full_cache = config.setting is None or (config.store == "memory" and is_optional)
        peak_limit = full_cache_limit if keeps_full_cache else usable
        return candidate.plan.peak <= peak_limit and candidate.kv_bytes <= kv_limit

    fitting = [candidate for candidate in candidates if fits(candidate)]
    if not fitting:
        return _recommend_smallest(candidates, usable, kv_limit)
    if fitting[0] is best:
        return best.recommendation(_why_best(best.config, n_prompt, request))
    return fitting[0].recommendation(_why_not_best(best, usable, kv_limit))


def _recommend_smallest(candidates: list[_Candidate], usable: int, kv_limit: int) -> Recommendation:
    """Recommend the candidate that takes the least memory. Used if no candidate fits."""

    def share_of_limit(candidate: _Candidate) -> float:
        return max(candidate.plan.peak / usable, candidate.kv_bytes / kv_limit)

    smallest = min(candidates, key=share_of_limit)
    limit = format_bytes(min(usable, kv_limit))
    why = f"no setting fits {limit}, and it takes the least memory"
    return smallest.recommendation(why, fits=False)


def _candidates(planner: Planner, request: AutoRequest, n_prompt: int) -> list[_Candidate]:
    """Return the supported candidates, best first. Settings that would change nothing are omitted.

    For short prompts, the full cache comes first. For models that can't be compressed, it is the only candidate.

    Raises: SnapKVError: the model supports none of the candidates.
    """
    configs = request.candidates(n_prompt) if planner.can_compress else ()
    if not configs or n_prompt < MIN_TOKENS_TO_EVICT:
        configs = (KEEP_ALL, *configs)
    candidates: list[_Candidate] = []
    refusal = None
    for listed_config in configs:
        try:
            config = request.with_min_ctx(listed_config)
            plan, kv_bytes = planner.memory_and_peak(n_prompt, config, request.kv_bits)
        except SnapKVError as error:
            refusal = error
            continue
        would_change_nothing = config.setting is not None and plan.reason is not None
        if not would_change_nothing:
            candidates.append(_Candidate(config, plan, kv_bytes))
    if refusal is not None and not candidates:
        raise refusal
    return candidates


def _why_best(config: CompressionConfig, n_prompt: int, request: AutoRequest) -> str:
    """Explain why `config`, the first candidate, is the best for a prompt of `n_prompt` tokens."""
    if config.setting is None and n_prompt < MIN_TOKENS_TO_EVICT:
        return f"at {n_prompt:,} tokens reading all entries costs little"
    if config.setting is None:
        return f"all entries of {n_prompt:,} tokens fit in memory"
    if config.sparse is None:
        return "the question chooses the entries that the answer needs from a long prompt"
    time_ratio = request.sparse_time_ratio(n_prompt)
    if config.store == "memory" and time_ratio < MAX_TIME_RATIO:
        return (
            f"on this machine an answer of {MAX_TOKENS} tokens to a prompt of {n_prompt:,} takes about "
            f"{time_ratio:.0%} of the full cache's time"
        )
    where = "stay in files" if in_files(config.store) else "fit in memory"
    bits = STORES[config.sparse.store].bits
    if bits is not None:
        where += f" in {bits} bits"
    return (
        f"all entries {where}, so that every token of the answer can choose the few that it reads"
    )


def _why_not_best(best: _Candidate, usable: int, kv_limit: int) -> str:
    """Explain why the best candidate is not recommended: how much memory it would take, and how much is available."""
    needed_bytes, limit = best.plan.peak, usable
    if best.kv_bytes > kv_limit:
        needed_bytes, limit = best.kv_bytes, kv_limit
    would_take = f"{best.config} would take {format_bytes(needed_bytes)}"
    if needed_bytes <= limit:  # it fits, but leaves too little for other programs
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
        task: the task that "auto" chooses for, such as `QUESTION`.
        options: mlx-lm's options. With a `prompt_cache` or a `draft_model`, "auto" does not choose sparse attention
            unless `store` is set.
        snapkv: see `generate_step`.
        policy: see `generate_step`; "auto" is allowed.
        sparse: see `generate_step`.
        max_tokens: maximum answer length in tokens.
        kv_memory: KV memory limit in bytes, for "auto". None for no limit.
        store: restricts "auto" to sparse attention with this store.

    Raises: SnapKVError: an option is invalid or conflicts with another, or the model supports none of the candidates
        for "auto".
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
    has_cache_or_draft = any(
        mlx_options.get(name) is not None for name in ("prompt_cache", "draft_model")
    )
    request = AutoRequest(
        n_prompt=n_prompt,
        task=task,
        may_be_sparse=not has_cache_or_draft,
        required_sparse=None if store is None else Sparse(store=store),
        kv_bits=mlx_options.get("kv_bits"),
        kv_memory=kv_memory,
        speed=speed_of(model, Sparse()),
    )
    n_answer = min(max(0, max_tokens), TYPICAL_PROMPT)  # for -1 (no limit), plan no answer
    planner = Planner(model, **planner_options(mlx_options) | {"max_tokens": n_answer})
    recommendation = recommend(planner, request, this_machine().usable)
    config = recommendation.config.with_mlx_options(mlx_options)
    return config, mlx_options, recommendation


def worth_comparing(n_prompt: int) -> list[str]:
    """Return two policies to compare with sparse attention on a prompt of `n_prompt` tokens.

    The first policy evicts only after prefill. The second also evicts during prefill. If the prompt has fewer than
    about 22,000 tokens, both policies get smaller budgets, so that they still evict most of the entries.
    """
    top_k = 4096
    # SnapKV keeps about 4/3 * top_k entries, which should be at most a quarter of the prompt.
    while top_k > 16 and 4 / 3 * top_k > n_prompt / 4:
        top_k //= 2
    evicting_once = f"snapkv:top_k={top_k}"
    evicting_within = f"keydiff:budget={2 * top_k} then snapkv:top_k={top_k // 2}"
    return [evicting_once, evicting_within]
