"""`mlx-snapkv plan`: how much of a machine's memory prompts will take, before a model is loaded."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from typer import Option

from ..measure.tables import Table
from ..planning.units import format_bytes
from .cache_options import AutoPolicyOptions, CacheOptions
from .options import AsJson, MaxTokens, Model, n_bytes, n_tokens, tokens_text
from .results import print_table

if TYPE_CHECKING:
    from ..planning.config import CompressionConfig
    from ..planning.machine import Machine
    from ..planning.memory_plan import MemoryPlan, Planner

PLANNED_CONTEXTS = tuple(1 << n for n in range(12, 21))


def mac_bytes(text: Any) -> int:
    """Memory of a Mac, of which a number without its unit would be a mistake."""
    return n_bytes(text, least=10**6)


@dataclass(frozen=True)
class PlanOptions:
    context: Annotated[
        int | None,
        Option(
            parser=n_tokens,
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

    chosen = policy.resolve()
    named = None if chosen is None else policy.policy or str(chosen)
    machine = this_machine() if options.memory is None else mac(options.memory)
    loaded = load_without_weights(model, for_mac=options.memory is not None)
    planner = Planner(
        loaded,
        max_tokens=options.max_tokens,
        prefill_step_size=cache.prefill_step_size,
        kv_group_size=cache.kv_group_size,
    )
    plans = Plans(model, machine, planner, named, cache.kv_bits, policy.kv_memory)
    choices = [
        plans.choose(n) for n in ([options.context] if options.context else plans.contexts())
    ]
    if options.as_json:
        print(json.dumps(plans.to_dict(choices)))
    else:
        plans.print(choices)


class Choice(NamedTuple):
    """Plans for one context: those to show, the one to recommend if any fits, and why."""

    context: int
    plans: list[MemoryPlan]
    best: MemoryPlan | None = None
    why: str = ""


@dataclass(frozen=True)
class Plans:
    """Plans for a model on a machine, with the user's `policy` if there is one."""

    model: str
    machine: Machine
    planner: Planner
    policy: str | None
    kv_bits: int | None
    kv_memory: int | None

    def contexts(self) -> list[int]:
        from ..planning.prefixes import DEFAULT_CONTEXT

        most = self.planner.trained_length or DEFAULT_CONTEXT
        return [*(n for n in PLANNED_CONTEXTS if n < most), most]

    def choose(self, n: int) -> Choice:
        """Plans for `n` tokens. The user's policy is recommended if it fits, else what --policy auto chooses."""
        from ..planning.auto import SNAPKV, SPARSE, AutoRequest, recommended

        planner, usable = self.planner, self.machine.usable
        # --kv-bits is for what a policy keeps.
        methods = [str(config.setting) for config in (SPARSE, SNAPKV)]
        methods = methods if self.kv_bits is None else methods[1:]
        shown = methods if planner.can_compress else []
        others = shown if self.policy is None else [self.policy]
        made = {policy: planner.plan(n, policy, self.kv_bits) for policy in (None, *others)}
        plans = [planner.plan(n)] if self.kv_bits is not None else []
        # A policy that would change nothing is shown only if it is the user's.
        plans += [plan for name, plan in made.items() if not plan.reason or name == self.policy]
        first = made[self.policy]
        if self.policy is not None and first.peak <= usable:
            return Choice(n, plans, first, "you asked for it, and it fits")
        request = AutoRequest(n, kv_bits=self.kv_bits, kv_memory=self.kv_memory)
        recommendation = recommended(planner, request, usable)
        if not recommendation.fits:
            return Choice(n, plans)
        would = f"{_policy_text(first)} would take {format_bytes(first.peak)}"
        over = f"{would}, and {format_bytes(usable)} is available"
        best = recommendation.plan
        plans += [] if best in plans else [best]
        return Choice(n, plans, best, recommendation.why if self.policy is None else over)

    def to_dict(self, choices: list[Choice]) -> dict[str, Any]:
        """What --json prints; sizes are in bytes."""
        plans = [plan for choice in choices for plan in choice.plans]
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
                for context, _, best, why in choices
            ],
        }

    def print(self, choices: list[Choice]) -> None:
        """Print a table of all plans, and what is recommended for the longest prompt that fits."""
        from ..models.trained_length import beyond_trained_length

        trained = self.planner.trained_length
        length = "unknown" if trained is None else f"{trained:,} tokens"
        print(f"The trained length of {self.model} is {length}.")
        print_table(self._table(choices))
        if choices[-1].best is None:
            room = format_bytes(min(self.machine.usable, self.kv_memory or self.machine.usable))
            print(f"No setting fits {tokens_text(choices[-1].context)} tokens into {room}.")
        fit = [(choice.best, choice.why) for choice in choices if choice.best is not None]
        for best, why in fit[-1:]:
            what = f"{_policy_text(best)}, because {why}.\n  {self._command(best)}"
            print(f"For {tokens_text(best.context)} tokens, recommended: {what}")
            if best.reason is not None:
                print(f"Nothing is compressed: {best.reason}.")
            if beyond := beyond_trained_length(self.planner.model, best.context):
                print(beyond)

    def _command(self, plan: MemoryPlan) -> str:
        words = f"mlx-snapkv generate --model {shlex.quote(self.model)} --prompt-file FILE --prompt QUESTION"
        if plan.policy is not None and plan.reason is None:
            words += f" {_config(plan).flags}"
        return words if plan.kv_bits is None else f"{words} --kv-bits {plan.kv_bits}"

    def _table(self, choices: list[Choice]) -> Table:
        plans = [plan for choice in choices for plan in choice.plans]
        usable, memory = self.machine.usable, format_bytes(self.machine.memory)
        remark = (
            "Peak memory during prefill (reading) and decoding (answering), including the weights. "
        )
        remark += f"{format_bytes(usable)} of {memory} is available to models."
        weights = f"Weights {format_bytes(plans[0].weights)}"
        columns = ["context", "method", "KV cache", "reading", "answering", "fits"]
        table = Table(weights, remark, columns)
        for choice in choices:
            for i, plan in enumerate(choice.plans):
                sizes = map(format_bytes, (plan.kv, plan.reading, plan.answering))
                fits = "yes" if plan.peak <= usable else "no"
                fits = "recommended" if plan == choice.best else fits
                context = "" if i else tokens_text(plan.context)
                table.add(context, _policy_text(plan), *sizes, fits)
        return table


def _policy_text(plan: MemoryPlan) -> str:
    text = str(_config(plan)) if plan.policy else "full cache"
    return text if plan.kv_bits is None else f"{text}, {plan.kv_bits} bits"


def _config(plan: MemoryPlan) -> CompressionConfig:
    from ..planning.config import CompressionConfig
    from ..planning.settings import setting_named

    setting = None if plan.policy is None else setting_named(plan.policy)
    return CompressionConfig(setting, store=plan.store)
