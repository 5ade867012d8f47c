"""`mlx-snapkv plan`: what prompts will take of a machine's memory, before a model is loaded."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from .cache_options import AutoPolicyOptions, CacheOptions
from .options import AsJson, MaxTokens, Model, n_bytes, n_tokens, tokens_text

if TYPE_CHECKING:
    from ..engine.machine import Machine
    from ..planning.plan import MemoryPlan, Planner
    from ..reporting.table import Table

CONTEXTS = tuple(1 << n for n in range(12, 21))
UNTOLD = 1 << 17  # tokens to plan at most for a model whose trained length is not known
FULL = "full cache"
SAME = "-"
SMALLEST_MAC = 10**6  # bytes: a number without its unit is a mistake


@dataclass(frozen=True)
class Choice:
    """Plans for a context: those to show, the one to recommend if any fits, and why."""

    context: int
    found: list[MemoryPlan]
    best: MemoryPlan | None
    why: str


@dataclass(frozen=True)
class Plans:
    """What was planned for a model on a machine.

    Attributes:
        trained: how many tokens it was trained to read, if known.
        kv_memory: bytes that entries are to keep to, if --policy auto is told so.
    """

    model: str
    machine: Machine
    trained: int | None
    choices: list[Choice]
    kv_memory: int | None = None

    @property
    def found(self) -> list[MemoryPlan]:
        return [plan for choice in self.choices for plan in choice.found]


def plan(
    *,
    model: Model,
    context: Annotated[
        str | None,
        Option(
            metavar="TOKENS",
            help="Tokens of a prompt, such as 128k; by default from 4k to the model's trained length.",
        ),
    ] = None,
    memory: Annotated[
        str | None,
        Option(
            metavar="SIZE",
            help="Memory of another Mac, such as 16GB, in the place of this machine's.",
        ),
    ] = None,
    policy: AutoPolicyOptions,
    cache: CacheOptions,
    max_tokens: MaxTokens = 256,
    as_json: AsJson = False,
) -> None:
    """Show how much memory prompts will take, what fits, and which policy to use, before a single weight is loaded.

    Reads a folder's configuration and the headers of its weights; of a Hugging Face repository, downloads only these.
    How it is counted, and how near it comes: docs/benchmarks.md.

    \b
      mlx-snapkv plan --model demo
      mlx-snapkv plan --model MODEL --context 128k --memory 16GB
      mlx-snapkv plan --model MODEL --context 1M --policy keydiff:budget=4096 --kv-bits 8
    """
    from ..models.rope import trained_length
    from ..planning.plan import Planner
    from .loading import load_without_weights

    chosen = policy.resolve()
    asked = None if chosen is None else policy.policy or str(chosen)
    length = None if context is None else n_tokens("--context", context)
    machine = _machine(memory)
    kv_memory = policy.kv_bytes
    loaded = load_without_weights(model)
    trained = trained_length(loaded)
    planner = Planner(
        loaded,
        kv_group_size=cache.kv_group_size,
        max_tokens=max_tokens,
        prefill_step_size=cache.prefill_step_size,
    )
    contexts = _contexts(trained) if length is None else [length]
    limits = machine.usable, kv_memory
    choices = [_choose(planner, n, asked, cache.kv_bits, *limits) for n in contexts]
    plans = Plans(model, machine, trained, choices, kv_memory)
    if as_json:
        print(json.dumps(_as_json(plans)))
    else:
        _print(plans)


def _machine(memory: str | None) -> Machine:
    from ..engine.machine import mac, this_machine

    if memory is None:
        return this_machine()
    return mac(n_bytes("--memory", memory, least=SMALLEST_MAC))


def _contexts(trained: int | None) -> list[int]:
    """Contexts to plan: none beyond the trained length."""
    if trained is None:
        return [n for n in CONTEXTS if n <= UNTOLD]
    return [*(n for n in CONTEXTS if n < trained), trained]


def _choose(
    planner: Planner,
    n: int,
    asked: str | None,
    kv_bits: int | None,
    usable: int,
    kv_memory: int | None,
) -> Choice:
    """Plans for `n` tokens; the policy asked for is recommended if it fits, else what --policy auto takes."""
    from ..engine.auto import QUESTION, SETTINGS
    from ..engine.report import format_bytes

    shown = [setting.policy for setting in SETTINGS[QUESTION][:2]]
    others = [asked] if asked is not None else shown if planner.can_compress else ()
    made = {policy: planner.plan(n, policy, kv_bits) for policy in (None, *others)}
    found = [planner.plan(n)] if kv_bits is not None else []
    # A policy that would change nothing is shown only if it was asked for.
    found += [plan for policy, plan in made.items() if not plan.reason or policy == asked]
    first = made[asked]
    if asked is not None and first.peak <= usable:
        return Choice(n, found, first, "you asked for it, and it fits")
    best, taken = planner.recommended(n, usable, kv_bits, kv_memory)
    if not taken.fits:
        return Choice(n, found, None, "")
    why = taken.why
    if asked is not None:
        size = format_bytes(first.peak)
        why = f"{_way(first)} would take {size}, and {format_bytes(usable)} may be used"
    return Choice(n, [*found, *([] if best in found else [best])], best, why)


def _as_json(plans: Plans) -> dict[str, Any]:
    return {
        "model": plans.model,
        "trained_length": plans.trained,
        "weights": plans.found[0].weights,
        "memory": plans.machine.memory,
        "usable": plans.machine.usable,
        "backend": _backend(),
        "plans": [
            plan.to_dict() | {"fits": plan.peak <= plans.machine.usable} for plan in plans.found
        ],
        "taken": [
            {
                "context": choice.context,
                "policy": choice.best and choice.best.policy,
                "fits": choice.best is not None,
                "why": choice.why,
                "command": choice.best and _command(plans.model, choice.best),
            }
            for choice in plans.choices
        ],
    }


def _backend() -> str:
    import mlx.core as mx

    return "metal" if mx.metal.is_available() else "cpu"


def _command(model: str, plan: MemoryPlan) -> str:
    """A command that reads such a prompt so."""
    words = ["mlx-snapkv", "generate", "--model", model, "--prompt-file", "FILE"]
    words += ["--prompt", "QUESTION"]
    if plan.policy is not None and plan.reason is None:
        words += ["--policy", plan.policy]
    if plan.kv_bits is not None:
        words += ["--kv-bits", str(plan.kv_bits)]
    return shlex.join(words)


def _print(plans: Plans) -> None:
    from ..engine.report import format_bytes
    from .results import print_table

    length = "an unknown number of" if plans.trained is None else f"{plans.trained:,}"
    print(f"{plans.model} was trained to read {length} tokens.")
    print_table(_table(plans))
    last = plans.choices[-1]
    if last.best is None:
        room = format_bytes(min(plans.machine.usable, plans.kv_memory or plans.machine.usable))
        print(f"Nothing fits {tokens_text(last.context)} tokens into {room}.")
    fit = [(choice.best, choice.why) for choice in plans.choices if choice.best is not None]
    for plan, why in fit[-1:]:
        print(f"For {tokens_text(plan.context)} tokens, recommended: {_way(plan)}, because {why}.")
        print(f"  {_command(plans.model, plan)}")
        if plan.reason is not None:
            print(f"Nothing is compressed: {plan.reason}.")
        if plan.beyond is not None:
            print(plan.beyond)


def _table(plans: Plans) -> Table:
    from mlx_lm.generate import DEFAULT_QUANTIZED_KV_START

    from ..engine.report import format_bytes
    from ..reporting.table import Table

    found = plans.found
    asked = any(plan.kv_bits is not None for plan in found)
    bits = [] if asked else [*found[0].kv_in_bits]
    bits = [n for n in bits if any(plan.kv_in_bits.get(n) != plan.kv for plan in found)]
    same = any(plan.kv_in_bits.get(n) == plan.kv for plan in found for n in bits)
    device = "Metal" if _backend() == "metal" else "MLX's CPU backend"
    remark = (
        f"The most in use while reading and answering, weights included, on {device}. "
        f"{format_bytes(plans.machine.usable)} of {format_bytes(plans.machine.memory)} may be used."
    )
    if same:
        remark += f" {SAME}: full caches of up to {DEFAULT_QUANTIZED_KV_START:,} tokens are not quantised."
    sizes = ["KV cache", *(f"{n} bits" for n in bits), "reading", "answering"]
    columns = ["context", "policy", *sizes, "fits"]
    table = Table(f"Weights {format_bytes(found[0].weights)}", remark, columns)
    for choice in plans.choices:
        for i, plan in enumerate(choice.found):
            in_bits = [plan.kv_in_bits.get(n, plan.kv) for n in bits]
            small = [SAME if size == plan.kv else format_bytes(size) for size in in_bits]
            peaks = format_bytes(plan.reading), format_bytes(plan.answering)
            fits = "yes" if plan.peak <= plans.machine.usable else "no"
            fits = "recommended" if plan == choice.best else fits
            context = "" if i else tokens_text(plan.context)
            table.add(context, _way(plan), format_bytes(plan.kv), *small, *peaks, fits)
    return table


def _way(plan: MemoryPlan) -> str:
    policy = plan.policy or FULL
    return policy if plan.kv_bits is None else f"{policy}, {plan.kv_bits} bits"
