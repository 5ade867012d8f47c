"""`mlx-snapkv plan`: show how much memory a model's prompts need, without loading its weights."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from typer import Option

from ..measure.tables import Table
from ..planning.units import format_bytes
from .cache_options import AutoPolicyOptions, CacheOptions
from .options import AsJson, MaxTokens, Model, format_tokens, parse_bytes, parse_tokens
from .terminal_table import print_table

if TYPE_CHECKING:
    from ..planning.break_even import BreakEven
    from ..planning.machine import Machine
    from ..planning.memory_plan import MemoryPlan, Planner
    from ..planning.settings import Setting
    from ..planning.speed_record import Speed

PLANNED_CONTEXTS = tuple(1 << n for n in range(12, 21))  # tokens


def mac_bytes(text: Any) -> int:
    """Parse a Mac's memory size. Reject small numbers, which probably lack a unit."""
    return parse_bytes(text, least=10**6)


@dataclass(frozen=True)
class PlanOptions:
    """Options for `plan`: prompt length, answer length and machine."""

    context: Annotated[
        int | None,
        Option(
            parser=parse_tokens,
            help="Prompt length in tokens, such as 128k; default: several, from 4k to the model's trained length.",
        ),
    ] = None
    memory: Annotated[
        int | None,
        Option(
            parser=mac_bytes,
            help="Plan for a Mac with this much memory, such as 16GB, instead of this machine.",
        ),
    ] = None
    max_tokens: MaxTokens = 256
    as_json: AsJson = False


def plan(
    *, model: Model, options: PlanOptions, policy: AutoPolicyOptions, cache: CacheOptions
) -> None:
    r"""Show how much memory prompts will take, what fits, and which setting to use, without loading any weights.

    Also show the prompt length above which sparse decoding is faster on this machine, based on earlier requests or, on
    a GPU, on an estimate. Only the model's configuration and weight headers are read, or downloaded from a Hugging Face
    repository. docs/benchmarks.md explains the arithmetic.

    \b
      mlx-snapkv plan --model demo
      mlx-snapkv plan --model MODEL --context 128k --memory 16GB
      mlx-snapkv plan --model MODEL --context 1M --policy keydiff:budget=4096 --kv-bits 8
    """
    from ..measure.layer_speed import sparse_pays
    from ..planning.machine import mac, this_machine
    from ..planning.memory_plan import Planner
    from ..planning.speed_record import Speed, speed_of
    from ..sparse.options import Sparse
    from .loading import load_without_weights
    from .prompt_console import PromptConsole

    setting = policy.resolve()
    machine = this_machine() if options.memory is None else mac(options.memory)
    loaded_model = load_without_weights(model, for_mac=options.memory is not None)
    planner = Planner(
        loaded_model,
        max_tokens=options.max_tokens,
        prefill_step_size=cache.prefill_step_size,
        kv_group_size=cache.kv_group_size,
    )
    speed = Speed()
    break_even: BreakEven | None = None
    if options.memory is None and planner.can_compress:
        speed = speed_of(loaded_model, Sparse())
        break_even = sparse_pays(loaded_model)
    plans = Plans(
        model=model,
        machine=machine,
        planner=planner,
        setting=setting,
        kv_bits=cache.kv_bits,
        kv_memory=policy.kv_memory,
        speed=speed,
        break_even=break_even,
    )
    PromptConsole().say_all(cache.bits_notes())
    contexts = [options.context] if options.context else plans.default_contexts()
    plans_by_length = [plans.for_context(context) for context in contexts]
    if options.as_json:
        print(json.dumps(plans.to_dict(plans_by_length)))
    else:
        plans.print(plans_by_length)


class ContextPlans(NamedTuple):
    """Memory plans for one prompt length.

    Attributes:
        context: prompt length in tokens.
        plans: plans to show.
        best: the recommended plan, one of `plans`. None if no setting fits.
        why: reason for the recommendation.
    """

    context: int
    plans: list[MemoryPlan]
    best: MemoryPlan | None = None
    why: str = ""


@dataclass(frozen=True)
class Plans:
    """Computes and prints memory plans for a model on a machine.

    Attributes:
        model: model name as typed by the user.
        setting: the user's setting, if any.
        kv_bits: bits per value of kept entries; see --kv-bits.
        kv_memory: KV memory limit in bytes; see --kv-memory.
        speed: speed record for sparse attention on this machine. Empty when planning for a different machine, or if the
            model can't be compressed.
        break_even: length from which sparse decoding is faster on this machine. None when planning for a different
            machine, or if the model can't be compressed.
    """

    model: str
    machine: Machine
    planner: Planner
    setting: Setting | None
    kv_bits: int | None
    kv_memory: int | None
    speed: Speed
    break_even: BreakEven | None

    def default_contexts(self) -> list[int]:
        """Return the default prompt lengths, up to the model's trained length."""
        from ..planning.prefixes import DEFAULT_CONTEXT

        longest = self.planner.trained_length or DEFAULT_CONTEXT
        shorter = [n_tokens for n_tokens in PLANNED_CONTEXTS if n_tokens < longest]
        return [*shorter, longest]

    def for_context(self, n_prompt: int) -> ContextPlans:
        """Return the plans for a prompt of `n_prompt` tokens.

        Recommend the user's setting if it fits, and otherwise what --policy auto chooses.
        """
        from ..planning.auto import AutoRequest, recommend

        usable = self.machine.usable
        plan_by_setting = {
            setting: self.planner.plan(n_prompt, setting, self.kv_bits)
            for setting in (None, *self._settings_to_plan())
        }
        plans = []
        if self.kv_bits is not None:
            # Also show the full cache without --kv-bits, for comparison.
            plans.append(self.planner.plan(n_prompt))
        for setting, plan in plan_by_setting.items():
            changes_nothing = bool(plan.reason)
            is_users_choice = setting == self.setting
            if is_users_choice or not changes_nothing:
                plans.append(plan)
        users_plan = plan_by_setting[self.setting]
        if self.setting is not None and users_plan.peak <= usable:
            return ContextPlans(
                context=n_prompt, plans=plans, best=users_plan, why="you asked for it, and it fits"
            )
        request = AutoRequest(
            n_prompt, kv_bits=self.kv_bits, kv_memory=self.kv_memory, speed=self.speed
        )
        recommendation = recommend(self.planner, request, usable)
        if not recommendation.fits:
            return ContextPlans(context=n_prompt, plans=plans)
        why = recommendation.why
        if self.setting is not None:
            would_take = f"{_method_text(users_plan)} would take {format_bytes(users_plan.peak)}"
            why = f"{would_take}, and {format_bytes(usable)} is available"
        best = recommendation.plan
        if best not in plans:
            plans.append(best)
        return ContextPlans(context=n_prompt, plans=plans, best=best, why=why)

    def _settings_to_plan(self) -> list[Setting | None]:
        """Return the settings to plan for in addition to the full cache.

        These are the user's setting or, without one, sparse attention and SnapKV. If the model can't be compressed and
        the user gave no setting, return an empty list.
        """
        from ..planning.auto import SNAPKV, SPARSE

        if self.setting is not None:
            return [self.setting]
        if not self.planner.can_compress:
            return []
        # --kv-bits can't be combined with sparse attention.
        configs = (SPARSE, SNAPKV) if self.kv_bits is None else (SNAPKV,)
        return [config.setting for config in configs]

    def to_dict(self, plans_by_length: list[ContextPlans]) -> dict[str, Any]:
        """Return the object for --json, with sizes in bytes."""
        plans = [plan for context_plans in plans_by_length for plan in context_plans.plans]
        usable = self.machine.usable
        return {
            "model": self.model,
            "trained_length": self.planner.trained_length,
            "weights": plans[0].weights,
            "memory": self.machine.memory,
            "usable": usable,
            "plans": [plan.to_dict() | {"fits": plan.peak <= usable} for plan in plans],
            "taken": [
                self._recommendation_to_dict(context_plans) for context_plans in plans_by_length
            ],
            "sparse_pays": None if self.break_even is None else self.break_even._asdict(),
        }

    def _recommendation_to_dict(self, context_plans: ContextPlans) -> dict[str, Any]:
        """Return the JSON object for the recommendation at one length."""
        best = context_plans.best
        return {
            "context": context_plans.context,
            "fits": best is not None,
            "why": context_plans.why,
            "policy": None if best is None else best.policy,
            "command": None if best is None else self._command(best),
        }

    def print(self, plans_by_length: list[ContextPlans]) -> None:
        """Print a table of all plans, and the recommended setting for the longest prompt that fits."""
        from ..models.trained_length import beyond_trained_length

        trained_length = self.planner.trained_length
        length_text = "unknown" if trained_length is None else f"{trained_length:,} tokens"
        print(f"The trained length of {self.model} is {length_text}.")
        print_table(self._table(plans_by_length))
        longest = plans_by_length[-1]
        if longest.best is None:
            limit = min(self.machine.usable, self.kv_memory or self.machine.usable)
            length = format_tokens(longest.context)
            print(f"No setting fits {length} tokens into {format_bytes(limit)}.")
        recommendations = [
            (plans.best, plans.why) for plans in plans_by_length if plans.best is not None
        ]
        if not recommendations:
            return
        if self.break_even is not None:
            print(f"On this machine, {self.break_even}.")
        best, why = recommendations[-1]  # for the longest prompt that fits
        advice = f"{_method_text(best)}, because {why}.\n  {self._command(best)}"
        print(f"For {format_tokens(best.context)} tokens, recommended: {advice}")
        if best.reason is not None:
            print(f"Nothing is compressed: {best.reason}.")
        length_warning = beyond_trained_length(self.planner.model, best.context)
        if length_warning:
            print(length_warning)

    def _command(self, plan: MemoryPlan) -> str:
        """Return a command that answers a prompt as planned."""
        from ..planning.config import CompressionConfig
        from ..planning.settings import setting_named

        command = f"mlx-snapkv generate --model {shlex.quote(self.model)} --prompt-file FILE --prompt QUESTION"
        if plan.policy is not None and plan.reason is None:
            command += f" {CompressionConfig(setting_named(plan.policy)).flags}"
        if plan.kv_bits is not None:
            command += f" --kv-bits {plan.kv_bits}"
        return command

    def _table(self, plans_by_length: list[ContextPlans]) -> Table:
        """Return a table with one row per plan."""
        usable = self.machine.usable
        any_plan = plans_by_length[0].plans[0]  # the weights are the same in all plans
        table = Table(
            title=f"Weights {format_bytes(any_plan.weights)}",
            remark="Peak memory during prefill (reading) and decoding (answering), including the weights. "
            f"{format_bytes(usable)} of {format_bytes(self.machine.memory)} is available to models.",
            columns=["context", "method", "KV cache", "reading", "answering", "fits"],
        )
        for context_plans in plans_by_length:
            for i, plan in enumerate(context_plans.plans):
                fits_text = "yes" if plan.peak <= usable else "no"
                if plan == context_plans.best:
                    fits_text = "recommended"
                # Show the length in its first row only.
                length = format_tokens(plan.context) if i == 0 else ""
                table.add(
                    length,
                    _method_text(plan),
                    format_bytes(plan.kv),
                    format_bytes(plan.reading),
                    format_bytes(plan.answering),
                    fits_text,
                )
        return table


def _method_text(plan: MemoryPlan) -> str:
    """Return a plan's setting and bits as text."""
    text = plan.policy or "full cache"
    return text if plan.kv_bits is None else f"{text}, {plan.kv_bits} bits"
