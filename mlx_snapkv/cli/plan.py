"""`mlx-snapkv plan`: the memory that prompts of a model will take, without loading its weights."""

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
    from ..planning.config import CompressionConfig
    from ..planning.machine import Machine
    from ..planning.memory_plan import MemoryPlan, Planner

PLANNED_CONTEXTS = tuple(1 << n for n in range(12, 21))  # tokens


def mac_bytes(text: Any) -> int:
    """Return the bytes of a Mac's memory. A small number is an error, since its unit must be missing."""
    return parse_bytes(text, least=10**6)


@dataclass(frozen=True)
class PlanOptions:
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
    """Show how much memory prompts will take, what fits, and which setting to use, before any weight is loaded.

    It reads the model's configuration and the headers of its weights; from a Hugging Face repository it downloads only
    these. docs/benchmarks.md explains the arithmetic.

    \b
      mlx-snapkv plan --model demo
      mlx-snapkv plan --model MODEL --context 128k --memory 16GB
      mlx-snapkv plan --model MODEL --context 1M --policy keydiff:budget=4096 --kv-bits 8
    """
    from ..planning.machine import mac, this_machine
    from ..planning.memory_plan import Planner
    from .loading import load_without_weights

    setting = policy.resolve()
    setting_text = None if setting is None else policy.policy or str(setting)
    machine = this_machine() if options.memory is None else mac(options.memory)
    loaded = load_without_weights(model, for_mac=options.memory is not None)
    planner = Planner(
        loaded,
        max_tokens=options.max_tokens,
        prefill_step_size=cache.prefill_step_size,
        kv_group_size=cache.kv_group_size,
    )
    plans = Plans(model, machine, planner, setting_text, cache.kv_bits, policy.kv_memory)
    contexts = [options.context] if options.context else plans.contexts()
    planned = [plans.for_context(n) for n in contexts]
    if options.as_json:
        print(json.dumps(plans.to_dict(planned)))
    else:
        plans.print(planned)


class ContextPlans(NamedTuple):
    """The plans for prompts of one length.

    Attributes:
        context: tokens of the prompt.
        plans: the plans to show.
        best: the recommended plan, which is one of `plans`; None if nothing fits.
        why: why `best` is recommended.
    """

    context: int
    plans: list[MemoryPlan]
    best: MemoryPlan | None = None
    why: str = ""


@dataclass(frozen=True)
class Plans:
    """Makes and prints the plans for a model on a machine.

    Attributes:
        model: the model's name, as the user typed it.
        policy: the user's policy or sparse attention, as text; None if the user chose none.
        kv_bits: bits of the entries kept; see --kv-bits.
        kv_memory: the limit of the entries in bytes; see --kv-memory.
    """

    model: str
    machine: Machine
    planner: Planner
    policy: str | None
    kv_bits: int | None
    kv_memory: int | None

    def contexts(self) -> list[int]:
        """Return the prompt lengths to plan by default, up to the model's trained length."""
        from ..planning.prefixes import DEFAULT_CONTEXT

        longest = self.planner.trained_length or DEFAULT_CONTEXT
        return [*(n for n in PLANNED_CONTEXTS if n < longest), longest]

    def for_context(self, n: int) -> ContextPlans:
        """Return the plans for a prompt of `n` tokens.

        The user's policy is recommended if it fits, and otherwise the choice of --policy auto.
        """
        from ..planning.auto import SNAPKV, SPARSE, AutoRequest, recommend

        planner, usable = self.planner, self.machine.usable
        if self.policy is not None:
            policies = [self.policy]
        elif not planner.can_compress:
            policies = []
        else:  # --kv-bits quantises only what a policy keeps
            configs = (SPARSE, SNAPKV) if self.kv_bits is None else (SNAPKV,)
            policies = [str(config.setting) for config in configs]
        by_policy = {policy: planner.plan(n, policy, self.kv_bits) for policy in (None, *policies)}
        plans = [] if self.kv_bits is None else [planner.plan(n)]
        # A policy that would change nothing is shown only if it is the user's.
        plans += [x for policy, x in by_policy.items() if not x.reason or policy == self.policy]
        asked = by_policy[self.policy]
        if self.policy is not None and asked.peak <= usable:
            return ContextPlans(n, plans, asked, "you asked for it, and it fits")
        request = AutoRequest(n, kv_bits=self.kv_bits, kv_memory=self.kv_memory)
        recommendation = recommend(planner, request, usable)
        if not recommendation.fits:
            return ContextPlans(n, plans)
        best, why = recommendation.plan, recommendation.why
        if self.policy is not None:
            would_take = f"{_policy_text(asked)} would take {format_bytes(asked.peak)}"
            why = f"{would_take}, and {format_bytes(usable)} is available"
        plans += [] if best in plans else [best]
        return ContextPlans(n, plans, best, why)

    def to_dict(self, planned: list[ContextPlans]) -> dict[str, Any]:
        """Return the object that --json prints; sizes are in bytes."""
        plans = [plan for each in planned for plan in each.plans]
        usable = self.machine.usable
        return {
            "model": self.model,
            "trained_length": self.planner.trained_length,
            "weights": plans[0].weights,
            "memory": self.machine.memory,
            "usable": usable,
            "plans": [plan.to_dict() | {"fits": plan.peak <= usable} for plan in plans],
            "taken": [
                {"context": context, "fits": best is not None, "why": why}
                | {"policy": best and best.policy, "store": best and best.store}
                | {"command": best and self._command(best)}
                for context, _, best, why in planned
            ],
        }

    def print(self, planned: list[ContextPlans]) -> None:
        """Print a table of all plans, and the recommended setting for the longest prompt that fits."""
        from ..models.trained_length import beyond_trained_length

        trained = self.planner.trained_length
        length = "unknown" if trained is None else f"{trained:,} tokens"
        print(f"The trained length of {self.model} is {length}.")
        print_table(self._table(planned))
        if planned[-1].best is None:
            limit = format_bytes(min(self.machine.usable, self.kv_memory or self.machine.usable))
            print(f"No setting fits {format_tokens(planned[-1].context)} tokens into {limit}.")
        fitting = [(each.best, each.why) for each in planned if each.best is not None]
        if not fitting:
            return
        best, why = fitting[-1]
        text = f"{_policy_text(best)}, because {why}.\n  {self._command(best)}"
        print(f"For {format_tokens(best.context)} tokens, recommended: {text}")
        if best.reason is not None:
            print(f"Nothing is compressed: {best.reason}.")
        if beyond := beyond_trained_length(self.planner.model, best.context):
            print(beyond)

    def _command(self, plan: MemoryPlan) -> str:
        """Return the command that answers a prompt as planned."""
        words = f"mlx-snapkv generate --model {shlex.quote(self.model)} --prompt-file FILE --prompt QUESTION"
        if plan.policy is not None and plan.reason is None:
            words += f" {_config(plan).flags}"
        return words if plan.kv_bits is None else f"{words} --kv-bits {plan.kv_bits}"

    def _table(self, planned: list[ContextPlans]) -> Table:
        """Return a table with a row for each plan."""
        plans = [plan for each in planned for plan in each.plans]
        usable, memory = self.machine.usable, format_bytes(self.machine.memory)
        remark = (
            "Peak memory during prefill (reading) and decoding (answering), including the weights. "
        )
        remark += f"{format_bytes(usable)} of {memory} is available to models."
        weights = f"Weights {format_bytes(plans[0].weights)}"
        columns = ["context", "method", "KV cache", "reading", "answering", "fits"]
        table = Table(weights, remark, columns)
        for each in planned:
            for i, plan in enumerate(each.plans):
                sizes = map(format_bytes, (plan.kv, plan.reading, plan.answering))
                fits = "yes" if plan.peak <= usable else "no"
                fits = "recommended" if plan == each.best else fits
                context = "" if i else format_tokens(plan.context)
                table.add(context, _policy_text(plan), *sizes, fits)
        return table


def _policy_text(plan: MemoryPlan) -> str:
    """Return the plan's policy, store and bits as text."""
    text = str(_config(plan)) if plan.policy else "full cache"
    return text if plan.kv_bits is None else f"{text}, {plan.kv_bits} bits"


def _config(plan: MemoryPlan) -> CompressionConfig:
    """Return the config that the plan is for, without quantisation."""
    from ..planning.config import CompressionConfig
    from ..planning.settings import setting_named

    setting = None if plan.policy is None else setting_named(plan.policy)
    return CompressionConfig(setting, store=plan.store)
