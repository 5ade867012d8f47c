"""`mlx-snapkv plan`: what prompts will take of a machine's memory, before a model is loaded."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import SnapKVError
from . import flags
from .options import MOST, n_bytes

if TYPE_CHECKING:
    from ..planning.machine import Machine
    from ..planning.plan import MemoryPlan
    from ..reporting.table import Table

CONTEXTS = tuple(1 << n for n in range(12, 21))
SHOWN = ("snapkv:top_k=4096,min_ctx=0", "keydiff:budget=8192,pool_kernel=5")
BITS = (8, 4)
FULL = "full cache"
COUNTING = "counting"
SMALLEST_MAC = 10**6  # bytes: a number without its unit is a mistake


def plan(
    model: flags.Model,
    context: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS", help="Tokens of a prompt, such as 128k; by default from 4k to 1M."
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory of another Mac, such as 16GB, in the place of this machine's.",
        ),
    ] = None,
    snapkv: flags.Snapkv = None,
    policy: flags.Policy = None,
    kv_bits: flags.KVBits = None,
    kv_group_size: flags.KVGroupSize = 64,
    max_tokens: flags.MaxTokens = 256,
    prefill_step_size: flags.PrefillStepSize = 2048,
    as_json: flags.AsJson = False,
) -> None:
    """Tell what memory prompts will take, what fits, and with which policy, before a single weight is loaded.

    Of a folder its configuration and the headers of its weights are read, of a Hugging Face repository only these are
    downloaded. How it is counted, and how near it comes: docs/plan.md.

    \b
      mlx-snapkv plan --model demo
      mlx-snapkv plan --model MODEL --context 128k --memory 16GB
      mlx-snapkv plan --model MODEL --context 1M --policy keydiff:budget=4096 --kv-bits 8
    """
    from ..planning.machine import mac, this_machine
    from ..policies import resolve_policy
    from .loading import load_without_weights
    from .progress import stderr_console

    chosen = resolve_policy(snapkv, policy)
    contexts = CONTEXTS if context is None else (n_tokens("--context", context),)
    machine = (
        this_machine() if memory is None else mac(n_bytes("--memory", memory, least=SMALLEST_MAC))
    )
    loaded = load_without_weights(model)
    options = {
        "kv_group_size": kv_group_size,
        "max_tokens": max_tokens,
        "prefill_step_size": prefill_step_size,
    }
    asked = None if chosen is None else policy or str(chosen)
    with stderr_console().status(COUNTING):
        found, taken = _counted(loaded, contexts, asked, kv_bits, machine, options)
    if as_json:
        print(json.dumps(_as_json(model, machine, found, taken)))
    else:
        _print(model, machine, found, taken)


def n_tokens(option: str, text: str) -> int:
    """Tokens from a number and, if there is one, a unit of 1,024s: "4096", "128k", "1M"."""
    number, unit = text.strip().lower(), 1
    if number[-1:] in ("k", "m"):
        number, unit = number[:-1], 1 << (10 if number[-1] == "k" else 20)
    try:
        found = int(float(number) * unit)
    except (ValueError, OverflowError):
        found = 0
    if not 1 <= found <= MOST:
        raise SnapKVError(
            f"{option} must be a number of tokens from 1 to {MOST}, such as 4096, 128k or 1M, got {text!r}"
        )
    return found


def _counted(
    model: Any,
    contexts: Sequence[int],
    asked: str | None,
    kv_bits: int | None,
    machine: Machine,
    options: dict[str, Any],
) -> tuple[list[MemoryPlan], dict[int, MemoryPlan | None]]:
    """The plans to show, and by context the one to take: of the policy that is asked for, where that fits."""
    from ..planning.plan import can_compress, fitting, plans

    ways: list[tuple[str | None, int | None]] = [(None, None)]
    if kv_bits is not None:
        ways.append((None, kv_bits))
    if asked is not None:
        ways.append((asked, kv_bits))
    elif can_compress(model):
        ways += [(policy, kv_bits) for policy in SHOWN]
    found = [
        plan
        for policy, bits in ways
        for plan in plans(model, contexts, policy, kv_bits=bits, **options)
    ]
    taken: dict[int, MemoryPlan | None] = {}
    for n in contexts:
        made = {p.policy: p for p in found if p.context == n and p.kv_bits == kv_bits}
        if asked is not None and made[asked].peak <= machine.usable:
            taken[n] = made[asked]
        else:
            taken[n] = fitting(model, n, machine.usable, made.values(), kv_bits=kv_bits, **options)
    return found, taken


def _as_json(
    model: str,
    machine: Machine,
    found: list[MemoryPlan],
    taken: dict[int, MemoryPlan | None],
) -> dict[str, Any]:
    from ..planning.evaluation import METAL, backend

    return {
        "model": model,
        "weights": found[0].weights,
        "memory": machine.memory,
        "usable": machine.usable,
        "backend": "metal" if backend() is METAL else "cpu",
        "plans": [plan.to_dict() | {"fits": plan.peak <= machine.usable} for plan in found],
        "taken": [
            {
                "context": n,
                "policy": None if plan is None else plan.policy,
                "fits": plan is not None,
                "command": None if plan is None else _command(model, plan),
            }
            for n, plan in taken.items()
        ],
    }


def _command(model: str, plan: MemoryPlan) -> str:
    """A command that reads such a prompt so."""
    words = ["mlx-snapkv", "generate", "--model", model, "--prompt-file", "FILE"]
    words += ["--prompt", "QUESTION"]
    if plan.policy is not None and plan.reason is None:
        words += ["--policy", plan.policy]
    if plan.kv_bits is not None:
        words += ["--kv-bits", str(plan.kv_bits)]
    return shlex.join(words)


def _print(
    model: str, machine: Machine, found: list[MemoryPlan], taken: dict[int, MemoryPlan | None]
) -> None:
    from ..engine.report import format_bytes
    from .print_table import print_table

    print_table(_table(model, machine, found, taken))
    n, plan = list(taken.items())[-1]
    if plan is None:
        print(f"Nothing fits {tokens(n)} tokens into {format_bytes(machine.usable)}.")
        fit = [plan for plan in taken.values() if plan is not None]
        if not fit:
            return
        plan = fit[-1]
        n = plan.context
    print(f"For {tokens(n)} tokens:\n  {_command(model, plan)}")
    if plan.beyond is not None:
        print(plan.beyond)


def _table(
    model: str, machine: Machine, found: list[MemoryPlan], taken: dict[int, MemoryPlan | None]
) -> Table:
    from ..engine.report import format_bytes
    from ..planning.evaluation import METAL, backend
    from ..reporting.table import Table

    device = "Metal" if backend() is METAL else "MLX's CPU backend"
    bits = [n for n in found[0].kv_in_bits if all(n in plan.kv_in_bits for plan in found)]
    heads = ["KV cache", *(f"{n} bits" for n in bits)]
    table = Table(
        f"{model}: weights {format_bytes(found[0].weights)}",
        f"Counted for {device}, with the weights. {format_bytes(machine.usable)} of "
        f"{format_bytes(machine.memory)} may be used. Taken: the policy asked for, or of what fits the best "
        "for the answer.",
        ["context", "policy", *heads, "reading", "answering", "fits"],
    )
    for n, take in taken.items():
        rows = [plan for plan in found if plan.context == n]
        if take is not None and take not in rows:
            rows.append(take)
        for i, plan in enumerate(rows):
            fits = "taken" if plan is take else "yes" if plan.peak <= machine.usable else "no"
            sizes = [plan.kv, *(plan.kv_in_bits[n] for n in bits), plan.reading, plan.answering]
            table.add(tokens(n) if i == 0 else "", _way(plan), *map(format_bytes, sizes), fits)
    return table


def _way(plan: MemoryPlan) -> str:
    policy = plan.policy or FULL
    return policy if plan.kv_bits is None else f"{policy}, {plan.kv_bits} bits"


def tokens(n: int) -> str:
    """A number of tokens as it may be typed: 131,072 is "128k"."""
    for unit, size in (("M", 1 << 20), ("k", 1 << 10)):
        if n >= size and n % size == 0:
            return f"{n // size}{unit}"
    return str(n)
