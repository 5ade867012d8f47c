"""What a model's prompts will take, by length and policy, and the policy that would fit."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from mlx_lm.generate import DEFAULT_QUANTIZED_KV_START
from mlx_lm.models.cache import KVCache, make_prompt_cache

from ..caches.layers import attention_layers, token_caches
from ..caches.quantizable import require_quantizable
from ..engine.decision import PREFILL_STEP_SIZE, gate
from ..engine.far import beyond
from ..engine.footprint import Footprint
from ..engine.recalling import Recall
from ..entries.quantization import Quantization, n_bytes, pack
from ..errors import SnapKVError, UnsupportedModelError
from ..policies import Policy, SnapKV, Stages, resolve_policy
from .blanks import arrays_of, blank_weights
from .peaks import answering_peak, operations_of_loops, reading_peak

MAX_TOKENS = 256  # of an answer, as mlx-lm's own default

SHOWN_BITS = (8, 4)  # of entries, that a plan tells the KV memory for

# From the best for the answer to the smallest; the first that fits is taken. None is the full cache.
CANDIDATES: tuple[str | None, ...] = (
    None,
    "snapkv:top_k=4096,min_ctx=0",
    "keydiff:budget=8192,pool_kernel=5",
    "keydiff:budget=4096,pool_kernel=5",
    "keydiff:budget=2048,pool_kernel=5",
)


@dataclass(frozen=True)
class MemoryPlan:
    """What a prompt of `context` tokens takes, in bytes.

    Attributes:
        policy, kv_bits: how its entries are kept; None is all, unquantised.
        weights: of the model.
        kv: of the entries once the prompt has been read, and compressed.
        kv_in_bits: the same, if they were quantised to so many; empty where they can't be.
        reading, answering: the most in use at once until then, and from then on; the weights included.
        reason: why the policy leaves the prompt as it is, if it does.
        beyond: a sentence, if the model was trained to read fewer tokens, and they are left where they are.
    """

    context: int
    policy: str | None
    kv_bits: int | None
    weights: int
    kv: int
    reading: int
    answering: int
    reason: str | None = None
    kv_in_bits: dict[int, int] = field(default_factory=dict)
    beyond: str | None = None

    @property
    def peak(self) -> int:
        return max(self.reading, self.answering)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"peak": self.peak}


def plan_memory(
    model: Any,
    context: int,
    policy: Policy | Stages | str | None = None,
    *,
    snapkv: SnapKV | dict[str, Any] | str | bool | None = None,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    max_tokens: int = MAX_TOKENS,
    prefill_step_size: int = PREFILL_STEP_SIZE,
) -> MemoryPlan:
    """How much memory a prompt will take, counted from the model itself; nothing is computed.

    The model's own graph of the prompt's last chunks is played through by the rules of MLX's evaluation, on the device
    that is the default one here. How near it comes is told in docs/plan.md.

    Args:
        model: an mlx-lm model, its weights loaded or not.
        context: tokens of the prompt.
        policy, snapkv, kv_bits, kv_group_size, max_tokens, prefill_step_size: as of `generate_step`.

    Raises:
        SnapKVError: the policy can't serve the model or a prompt of this length, or reads it twice.
    """
    if context < 1:
        raise SnapKVError(f"context must be at least 1 token, got {context}")
    chosen = resolve_policy(snapkv, policy)
    quantization = _quantization(model, kv_bits, kv_group_size)
    sizes = max_tokens, prefill_step_size
    plan = _with_peaks(model, chosen, quantization, sizes, context)
    return replace(plan, policy=policy) if isinstance(policy, str) else plan


def _with_peaks(
    model: Any,
    policy: Policy | Stages | None,
    quantization: Quantization | None,
    sizes: tuple[int, int],
    context: int,
    reading: int | None = None,
) -> MemoryPlan:
    """A plan of an answer's tokens and a chunk's, `sizes`; the peak of reading may be known."""
    with blank_weights(model):
        plan = _without_peaks(model, context, policy, quantization, sizes)
        used, (max_tokens, step_size) = None if plan.reason else policy, sizes
        if reading is None:
            reading = reading_peak(model, context, used, quantization, step_size)
        answering = answering_peak(model, context, max_tokens, used, quantization, step_size)
    return replace(plan, reading=reading, answering=answering)


def _without_peaks(
    model: Any,
    context: int,
    policy: Policy | Stages | None,
    quantization: Quantization | None,
    sizes: tuple[int, int],
) -> MemoryPlan:
    """A plan of an answer's tokens and a chunk's, `sizes`, but for its peaks."""
    reason = None if policy is None else gate(policy, context, None, sizes[0])
    used = None if reason else policy

    def kv(how: Quantization | None) -> int:
        if used is None and how is not None and context > DEFAULT_QUANTIZED_KV_START:
            return context * _quantised_row_bytes(model, how)
        return Footprint(model, used, how, sizes[1]).need(context, sizes[0]).kv_bytes

    group = 64 if quantization is None else quantization.group_size
    in_bits = {}
    for bits in SHOWN_BITS:
        with contextlib.suppress(SnapKVError, ValueError):
            in_bits[bits] = kv(_quantization(model, bits, group))
    weights = sum(x.nbytes for x in arrays_of(model.parameters()))
    return MemoryPlan(
        context,
        None if policy is None else str(policy),
        None if quantization is None else quantization.bits,
        weights,
        kv(quantization),
        0,
        0,
        reason,
        in_bits,
        beyond(model, used, Recall(), context),
    )


def _quantization(model: Any, kv_bits: int | None, group_size: int) -> Quantization | None:
    """How entries are quantised; SnapKVError if the model's can't be."""
    if kv_bits is None:
        return None
    found = Quantization(kv_bits, group_size)
    layers = attention_layers(model, make_prompt_cache(model)) if can_compress(model) else []
    require_quantizable(model, layers, found)
    return found


def _quantised_row_bytes(model: Any, quantization: Quantization) -> int:
    """Bytes of a token in a full cache that mlx-lm has quantised."""
    caches = token_caches(model)
    stored = [c.keys_and_values() for c in caches if isinstance(c, KVCache) and not c.empty()]
    return sum(n_bytes([pack(x, quantization) for x in entries]) for entries in stored)


def can_compress(model: Any) -> bool:
    """Whether policies serve the model."""
    try:
        attention_layers(model, make_prompt_cache(model))
    except UnsupportedModelError:
        return False
    return True


def plans(
    model: Any,
    contexts: Sequence[int],
    policy: str | None,
    *,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    max_tokens: int = MAX_TOKENS,
    prefill_step_size: int = PREFILL_STEP_SIZE,
) -> list[MemoryPlan]:
    """Plans for growing contexts; arguments as of `plan_memory`.

    Where layers loop over the tokens, and a graph takes seconds, straight lines are drawn between a few peaks.
    """
    known = range(len(contexts))
    if operations_of_loops(model):
        known = range(0, len(contexts), max(1, (len(contexts) - 1) // 2))
    quantization = _quantization(model, kv_bits, kv_group_size)
    sizes = max_tokens, prefill_step_size
    of = functools.partial(_with_peaks, model, resolve_policy(policy=policy), quantization, sizes)
    made = {contexts[i]: of(contexts[i]) for i in known}
    for n in contexts:
        if n not in made:
            below = made[max(x for x in made if x < n)]
            above = made.get(min((x for x in made if x > n), default=0))
            made[n] = of(n, None if above is None else _between(below, above, n))
    return [replace(made[n], policy=policy) for n in contexts]


def _between(below: MemoryPlan, above: MemoryPlan, context: int) -> int | None:
    """The peak of reading on the straight line between two contexts; None if they are not read alike."""
    if (below.reason is None) != (above.reason is None):
        return None
    rise = (above.reading - below.reading) * (context - below.context)
    return below.reading + rise // (above.context - below.context)


def fitting(
    model: Any, context: int, usable: int, found: Iterable[MemoryPlan] = (), **options: Any
) -> MemoryPlan | None:
    """The plan of the first of `CANDIDATES` that fits; None if none does.

    Of more tokens than the model was trained to read, the first that also brings them nearer, if one does.

    Args:
        usable: bytes.
        found: plans for this context that are made already.
    """
    known = {plan.policy: plan for plan in found if plan.context == context}
    best = None
    for policy in CANDIDATES if can_compress(model) else CANDIDATES[:1]:
        plan = known.get(policy) or plan_memory(model, context, policy, **options)
        if plan.peak > usable:
            continue
        if plan.beyond is None:
            return plan
        best = best or plan
    return best
