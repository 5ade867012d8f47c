"""mlx-lm's server and ours, in turn, with so many clients at once."""

from __future__ import annotations

import contextlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..demo import MODELS
from ..policies import Policy
from .clients import ANSWER, Answer, Client, ask, ask_in_rounds, tokens_while_all_answer
from .run import PARTS, Plan, Progress, Result
from .server_process import running

HELLO = [{"role": "user", "content": "Hello"}]


@dataclass(frozen=True)
class Server:
    """One of those that are measured side by side.

    Attributes:
        name: as printed.
        kind: "mlx-lm", "recall" or "drop".
        command: the module and its arguments, all but the model and the address.
    """

    name: str
    kind: str
    command: tuple[str, ...]


def server_field(policy: Policy, n_clients: int) -> list[Server]:
    """Who is measured, mlx-lm's first: with its own options all."""
    ours = ("mlx_snapkv", "serve", "--policy", str(policy), "--concurrency", str(n_clients))
    return [
        Server("mlx_lm.server", "mlx-lm", ("mlx_lm", "server")),
        Server("ours, recall", "recall", (*ours, "--memory", "recall")),
        Server("ours, drop", "drop", (*ours, "--memory", "drop")),
    ]


@contextlib.contextmanager
def same_model(name: str) -> Iterator[str]:
    """What both servers are given as `--model`.

    An embedded one is in float32 where our loader makes it so, since CPUs only emulate float16: mlx-lm's is not to
    be measured with the slow one, nor its bytes compared with those.
    """
    if name not in MODELS:
        yield name
        return
    if mx.default_device() != mx.Device(mx.cpu):
        yield str(MODELS[name])
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / name
        shutil.copytree(MODELS[name], copy)
        for path in copy.glob("*.safetensors"):
            weights = mx.load(str(path))
            wide = {key: weight.astype(mx.float32) for key, weight in weights.items()}  # type: ignore[union-attr]
            mx.eval(wide)
            mx.save_safetensors(str(path), wide, {"format": "mlx"})
        yield str(copy)


def measure_servers(
    model: str, tokenizer: Any, plan: Plan, counts: list[int], progress: Progress
) -> Result:
    """The records of all servers, with each of so many clients and each length of the plan's prompts.

    Args:
        model: a folder, a repository or an embedded model's name, which every server loads by itself.
    """
    result: Result = {part: [] for part in PARTS}
    found = [
        (length, n, server)
        for length in plan.prompts
        for n in counts
        for server in server_field(plan.policy_for(length), n)
    ]
    progress.start("servers", len(found))
    with same_model(model) as folder:
        for length, n, server in found:
            result["server"].append(measure_server(folder, tokenizer, length, n, server))
            progress.advance()
            progress.save(result)
    return result


def measure_server(
    model: str, tokenizer: Any, length: int, n_clients: int, server: Server
) -> dict[str, Any]:
    """One record: so many clients, each with a document of about `length` tokens and its questions.

    Raises:
        SnapKVError: the server can't be started, or does not answer.
    """
    clients = [Client(tokenizer, seed, length) for seed in range(n_clients)]
    figures: list[dict[str, Any]] = []
    with running([*server.command, "--model", model]) as process:
        ask(process.url, HELLO, {})  # until then, the model may be loading
        process.figures()
        began = time.perf_counter()
        rounds = ask_in_rounds(clients, process.url, lambda n: figures.append(process.figures()))
        seconds = time.perf_counter() - began
    first, last = figures[0], figures[-1]
    together = max(first["kv_bytes"])
    return {
        "context": length,
        "clients": n_clients,
        "contender": server.name,
        "kind": server.kind,
        "answer": ANSWER,
        "run_seconds": seconds,
        **_times(rounds, seconds),
        "kv_bytes": first["kv_bytes"][together],
        "kv_requests": together,
        **{key: last[key] for key in ("prefix_bytes", "peak_bytes", "own_bytes")},
        "right": sum(client.n_right for client in clients),
        "questions": sum(map(len, rounds)),
    }


def _times(rounds: list[list[Answer]], seconds: float) -> dict[str, Any]:
    later = [answer for answers in rounds[1:] for answer in answers]
    tokens, together = tokens_while_all_answer(rounds)
    return {
        "first_seconds": _sorted_seconds(rounds[0]),
        "follow_up_seconds": _sorted_seconds(later),
        "tokens_per_second": sum(a.n_tokens for answers in rounds for a in answers) / seconds,
        "together_tokens_per_second": tokens / together if together else None,
        "follow_up_tokens": statistics.mean(answer.n_prompt for answer in later),
        "cached_tokens": statistics.mean(answer.n_cached for answer in later),
    }


def _sorted_seconds(answers: list[Answer]) -> list[float]:
    return sorted(answer.first_seconds for answer in answers)
