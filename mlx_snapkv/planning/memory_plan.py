"""Estimates how much memory a prompt takes with a given model and setting, without loading the weights."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from ..caches.layers import require_quantizable
from ..compress.policies import SnapKV
from ..entries.quantization import Quantization
from ..errors import SnapKVError
from ..models.trained_length import trained_length
from ..sparse.options import Sparse
from .config import CompressionConfig
from .entry_sizes import EntrySizes, weight_bytes
from .footprint import Footprint
from .prompt_plan import MAX_TOKENS, PREFILL_STEP_SIZE
from .settings import Setting, resolve_setting, setting_named


@dataclass(frozen=True)
class MemoryPlan:
    """The memory that a prompt of `context` tokens takes, in bytes."""

    context: int
    policy: str | None  # None means the full cache
    kv_bits: int | None  # None means no quantisation
    weights: int
    kv: int  # size of the entries after compression
    reading: int  # peak until compression, including weights
    answering: int  # peak after compression, including weights
    reason: str | None = None  # why the prompt is not compressed

    @property
    def peak(self) -> int:
        """Return the peak memory of the whole request in bytes."""
        return max(self.reading, self.answering)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields and `peak` as a JSON-serialisable dict."""
        return asdict(self) | {"peak": self.peak}


class Planner:
    """Estimates how much memory prompts take with one model.

    The model's weights need not be loaded. The options are the same as in `generate_step`.
    """

    def __init__(
        self,
        model: Any,
        *,
        kv_group_size: int = 64,
        max_tokens: int = MAX_TOKENS,
        prefill_step_size: int = PREFILL_STEP_SIZE,
    ):
        """Determine the model's shapes and the size of its weights."""
        self.model = model
        self.trained_length = trained_length(model)
        self._group_size = kv_group_size
        self._max_tokens = max_tokens
        self._step_size = prefill_step_size
        self._sizes = EntrySizes(model)
        self._weights = weight_bytes(model)
        self.can_compress = bool(self._sizes.layers)

    def plan(
        self, context: int, policy: Setting | str | None = None, kv_bits: int | None = None
    ) -> MemoryPlan:
        """Estimate how much memory a prompt of `context` tokens takes; see `plan_memory`."""
        if context < 1:
            raise SnapKVError(f"context must be at least 1 token, got {context}")
        setting = setting_named(policy) if isinstance(policy, str) else policy
        plan, _ = self.memory_and_peak(context, CompressionConfig(setting), kv_bits)
        if isinstance(policy, str):  # show the policy as the caller wrote it
            return replace(plan, policy=policy)
        return plan

    def memory_and_peak(
        self, context: int, config: CompressionConfig, kv_bits: int | None = None
    ) -> tuple[MemoryPlan, int]:
        """Return a prompt's memory plan, and the peak size of its entries in bytes.

        Raises: SnapKVError: the prompt can't be planned, or the model does not support the quantisation.
        """
        quantization = self._quantization(kv_bits)
        footprint = Footprint(
            self._sizes,
            replace(config, quantization=quantization),
            self._step_size,
            quantises_full=True,
        )
        plan = footprint.plan(context, self._max_tokens)
        need = footprint.need(plan, self._max_tokens)
        setting = config.setting
        memory_plan = MemoryPlan(
            context=context,
            policy=None if setting is None else str(setting),
            kv_bits=None if quantization is None else quantization.bits,
            weights=self._weights,
            kv=need.kept_bytes + need.extra_in_answer,
            reading=self._weights + need.prefill_peak,
            answering=self._weights + need.answer_peak,
            reason=None if setting is None else plan.reason,
        )
        return memory_plan, need.peak_entry_bytes

    def _quantization(self, kv_bits: int | None) -> Quantization | None:
        """Return the quantisation with `kv_bits` bits. Raises: SnapKVError: the model does not support it."""
        if kv_bits is None:
            return None
        quantization = Quantization(kv_bits, self._group_size)
        require_quantizable(self.model, self._sizes.layers, quantization)
        return quantization


def planner_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return those of the `generate_step` options that `Planner` has arguments for."""
    names = ("max_tokens", "prefill_step_size", "kv_group_size")
    return {name: options[name] for name in names if name in options}


def plan_memory(
    model: Any,
    context: int,
    policy: Setting | str | None = None,
    *,
    snapkv: SnapKV | dict[str, Any] | str | bool | None = None,
    sparse: Sparse | dict[str, Any] | str | bool | None = None,
    kv_bits: int | None = None,
    **options: int,
) -> MemoryPlan:
    """Estimate how much memory a prompt takes on the default device, using only the model's shapes.

    See docs/benchmarks.md for how the estimate works.

    Args:
        model: an mlx-lm model. Its weights need not be loaded.
        context: prompt length in tokens.
        policy: see `generate_step`; "auto" is not supported.
        snapkv: see `generate_step`.
        sparse: see `generate_step`.
        kv_bits: bits per value of the kept entries. By default, they are not quantised.
        **options: `kv_group_size`, `max_tokens` and `prefill_step_size`, as in `generate_step`.

    Raises: SnapKVError: an argument is invalid, or the model does not support the setting or the quantisation.
    """
    setting = resolve_setting(snapkv, policy, sparse)
    # Pass a string on unchanged, so that the plan shows the policy as the user wrote it.
    policy_or_setting = policy if isinstance(policy, str) else setting
    return Planner(model, **options).plan(context, policy_or_setting, kv_bits)
