"""What a model's prompts will take, by length and policy, and the policy that would fit."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import asdict, dataclass, field
from typing import Any

from mlx_lm.generate import DEFAULT_QUANTIZED_KV_START

from ..caches.layers import attention_layers, require_quantizable
from ..engine.auto import QUESTION, Cost, Setting, Taken, recommended
from ..engine.footprint import EntrySizes, Footprint
from ..engine.prompt_plan import PREFILL_STEP_SIZE, gate
from ..engine.retention import DROP
from ..entries.quantization import Quantization
from ..errors import SnapKVError, UnsupportedModelError
from ..policies import Policy, SnapKV, Stages, resolve_policy
from .peaks import Peaks

MAX_TOKENS = 256  # of an answer, as mlx-lm's own default
SHOWN_BITS = (8, 4)  # of entries, that a plan tells the KV memory for


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


class Planner:
    """Plans prompts of one model, its weights loaded or not; the options are those of `generate_step`."""

    def __init__(
        self,
        model: Any,
        *,
        kv_group_size: int = 64,
        max_tokens: int = MAX_TOKENS,
        prefill_step_size: int = PREFILL_STEP_SIZE,
    ):
        self._model, self._group_size = model, kv_group_size
        self._max_tokens, self._step_size = max_tokens, prefill_step_size
        try:
            self._sizes = EntrySizes(model)
        except UnsupportedModelError:
            self._sizes = EntrySizes(model, compresses=False)
        self.can_compress = bool(self._sizes.layers)
        self._peaks = Peaks(model, self._sizes, max_tokens, prefill_step_size)
        self._footprint = functools.cache(self._made)

    def plan(
        self, context: int, policy: Policy | Stages | str | None = None, kv_bits: int | None = None
    ) -> MemoryPlan:
        """What a prompt of `context` tokens takes; arguments and errors as of `plan_memory`."""
        if context < 1:
            raise SnapKVError(f"context must be at least 1 token, got {context}")
        chosen, how = resolve_policy(policy=policy), self._quantization(kv_bits)
        reason = None if chosen is None else gate(chosen, context, None, self._max_tokens)
        used = None if reason else chosen
        footprint = self._footprint(used, how)
        in_bits = {}
        for bits in SHOWN_BITS:
            with contextlib.suppress(SnapKVError, ValueError):
                in_bits[bits] = self._kv(context, used, self._quantization(bits))
        return MemoryPlan(
            context,
            None if chosen is None else policy if isinstance(policy, str) else str(chosen),
            kv_bits,
            self._peaks.weights,
            self._kv(context, used, how),
            self._peaks.reading(footprint, context, how),
            self._peaks.answering(footprint, context, how),
            reason,
            in_bits,
            DROP.warning(self._model, used, context),
        )

    def recommended(
        self,
        context: int,
        usable: int,
        kv_bits: int | None = None,
        kv_memory: int | None = None,
    ) -> tuple[MemoryPlan, Taken]:
        """The plan of what `policy="auto"` takes for one question within `kv_memory`, and why."""
        how = self._quantization(kv_bits)

        def cost(setting: Setting) -> Cost:
            plan = self.plan(context, setting.policy, kv_bits)
            policy = resolve_policy(policy=setting.policy)
            is_quantised = policy is None and how is not None  # by mlx-lm, which no need counts
            need = self._footprint(policy, how).need(context, self._max_tokens)
            return Cost(plan.peak, plan.kv if is_quantised else need.most, plan.beyond)

        choose = functools.partial(recommended, can_compress=self.can_compress)
        taken = choose(context, QUESTION, cost, usable, kv_memory=kv_memory)
        return self.plan(context, taken.setting.policy, kv_bits), taken

    def _made(self, policy: Policy | Stages | None, how: Quantization | None) -> Footprint:
        """Raises: SnapKVError: the policy can't serve the model, or reads a prompt twice."""
        name = policy and policy.stages[1].repeats and policy.stages[1].name
        if name:
            raise SnapKVError(
                f"{name} reads a prompt twice, which is not counted: plan another policy"
            )
        if policy is not None and not self.can_compress:
            attention_layers(self._model, self._sizes.caches)  # says why
        return Footprint(self._model, policy, how, self._step_size, self._sizes)

    def _kv(self, context: int, policy: Policy | Stages | None, how: Quantization | None) -> int:
        """Bytes of the entries once a prompt has been read, and compressed."""
        if policy is None and context > DEFAULT_QUANTIZED_KV_START:
            return context * self._sizes.full(how)
        return self._footprint(policy, how).need(context, self._max_tokens).kv_bytes

    def _quantization(self, kv_bits: int | None) -> Quantization | None:
        """How entries are quantised; SnapKVError if the model's can't be."""
        if kv_bits is None:
            return None
        found = Quantization(kv_bits, self._group_size)
        require_quantizable(self._model, self._sizes.layers, found)
        return found


def plan_memory(
    model: Any,
    context: int,
    policy: Policy | Stages | str | None = None,
    *,
    snapkv: SnapKV | dict[str, Any] | str | bool | None = None,
    kv_bits: int | None = None,
    **options: int,
) -> MemoryPlan:
    """How much memory a prompt will take on the default device, counted from the model's shapes (docs/benchmarks.md).

    Args:
        model: an mlx-lm model, its weights loaded or not.
        context: tokens of the prompt.
        policy, snapkv, kv_bits: as of `generate_step`, and so are `kv_group_size`, `max_tokens`, `prefill_step_size`.

    Raises:
        SnapKVError: the policy can't serve the model or a prompt of this length, or reads it twice.
    """
    chosen = resolve_policy(snapkv, policy)
    named = policy if isinstance(policy, str) else chosen
    return Planner(model, **options).plan(context, named, kv_bits)
