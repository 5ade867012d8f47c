"""`mlx-snapkv demo`: the same questions with the full cache, with sink and window alone, and with SnapKV."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ..demo.documents import Fact, make_document, make_facts
from ..errors import SnapKVError
from ..policies import SnapKV
from ..report import format_bytes
from .loading import load_model

N_SINK, N_WINDOW = 4, 32
SHARE = 16  # the cut: one row in so many is kept


@dataclass
class Answer:
    text: str
    right: bool
    tokens_per_second: float
    kv_bytes: int


def demo(
    model: Annotated[
        str, typer.Option(help="Model folder, Hugging Face repository, or embedded name.")
    ] = "demo",
    tokens: Annotated[int, typer.Option(min=512, help="Length of the document.")] = 2048,
    questions: Annotated[int, typer.Option(min=1, max=32, help="Facts to hide and ask for.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of the document.")] = 0,
) -> None:
    """Hide facts in a long document and ask for them with three caches: full, sink + window, SnapKV."""
    console = Console()
    loaded, tokenizer = load_model(model)
    facts, prompts = _make_prompts(tokenizer, tokens, questions, seed)
    budget = len(prompts[0]) // SHARE
    top_k = budget - N_SINK - N_WINDOW
    if len(prompts[0]) <= budget:
        raise SnapKVError(f"--tokens must be larger, got {tokens}")
    snapkv = SnapKV(top_k=top_k, n_sink=N_SINK, n_window=N_WINDOW, min_ctx=0)
    window = SnapKV(top_k=0, n_sink=N_SINK, n_window=budget - N_SINK, min_ctx=0)
    ways = {"full cache": None, "sink + window": window, "SnapKV": snapkv}
    console.print(
        f"A document of about {len(prompts[0]):,} tokens hides {len(facts)} facts. Each question below is asked on "
        f"three caches: all rows, and 1/{SHARE} of them ({budget} rows) chosen in two ways."
    )
    jobs = [(fact, prompt, way) for fact, prompt in zip(facts, prompts) for way in ways]
    answers: dict[str, list[Answer]] = {way: [] for way in ways}
    for fact, prompt, way in track(jobs, "asking", console=Console(stderr=True), transient=True):
        answers[way].append(_ask(loaded, tokenizer, prompt, fact, ways[way]))
    console.print(_answers_table(facts, answers))
    console.print(_figures_table(answers))
    console.print("Try your own: mlx-snapkv generate --model demo --prompt-file FILE --prompt QUESTION --snapkv "
                  f"top_k={top_k},n_sink={N_SINK},n_window={N_WINDOW},min_ctx=0", soft_wrap=True)  # fmt: skip


def _make_prompts(
    tokenizer, n_tokens: int, questions: int, seed: int
) -> tuple[list[Fact], list[list[int]]]:
    rng = random.Random(seed)
    facts = make_facts(rng, questions)

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    document = make_document(rng, facts, n_tokens, count)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"{document}\n\n{fact.question}"}],
            add_generation_prompt=True,
        )
        for fact in facts
    ]
    return facts, prompts


def _ask(model, tokenizer, prompt: list[int], fact: Fact, policy: SnapKV | None) -> Answer:
    from mlx_lm.models.cache import make_prompt_cache

    from ..compress import kv_bytes
    from ..generate import stream_generate

    cache = make_prompt_cache(model)
    pieces: list[str] = []
    times: list[float] = []
    # Every answer decodes the same number of steps, so that the speeds compare.
    for response in stream_generate(
        model, tokenizer, prompt, 32, policy=policy, prompt_cache=cache
    ):
        pieces.append(response.text)
        times.append(time.perf_counter())
    text = "".join(pieces).strip()
    steps = len(times) - 1
    speed = steps / (times[-1] - times[0]) if steps else 0.0
    return Answer(text, text.startswith(fact.value), speed, kv_bytes(cache))


def _answers_table(facts: list[Fact], answers: dict[str, list[Answer]]) -> Table:
    table = Table(title="Answers", title_justify="left")
    table.add_column("question")
    table.add_column("hidden")
    for way in answers:
        table.add_column(way)
    for i, fact in enumerate(facts):
        cells = [_mark(a[i]) for a in answers.values()]
        table.add_row(f"the {fact.attribute} of the {fact.subject}", fact.value, *cells)
    return table


def _mark(answer: Answer) -> str:
    line = answer.text.splitlines()[0] if answer.text else ""
    shown = line if len(line) <= 24 else line[:23] + "…"
    return f"[green]right[/] {shown}" if answer.right else f"[red]wrong[/] {shown}"


def _figures_table(answers: dict[str, list[Answer]]) -> Table:
    table = Table(title="Figures", title_justify="left")
    for name in ("cache", "right", "tokens/s", "KV memory", "ratio"):
        table.add_column(name, justify="left" if name == "cache" else "right")
    full = next(iter(answers.values()))
    for way, given in answers.items():
        speed = sorted(a.tokens_per_second for a in given)[len(given) // 2]
        table.add_row(
            way,
            f"{sum(a.right for a in given)}/{len(given)}",
            f"{speed:,.0f}",
            format_bytes(given[0].kv_bytes),
            f"{full[0].kv_bytes / given[0].kv_bytes:.1f}x smaller" if way != "full cache" else "",
        )
    return table
