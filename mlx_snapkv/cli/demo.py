"""`mlx-snapkv demo`: the same questions with the full cache, with sink and window alone, and with SnapKV."""

from __future__ import annotations

import os
import random
import shlex
import shutil
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from ..demo.documents import Fact
from ..demo.questions import is_right, make_haystack, question_prompt
from ..engine.report import format_bytes
from ..errors import SnapKVError
from ..paths import path_of, put, reason
from .loading import load_model
from .options import DocumentSeed, Facts, Model
from .values import MOST

if TYPE_CHECKING:
    from rich.table import Table

    from ..policies import SnapKV

SHARE = 16  # one entry in so many is kept


@dataclass
class Answer:
    text: str
    right: bool
    tokens_per_second: float
    kv_bytes: int


def demo(
    model: Model = "demo",
    tokens: Annotated[int, typer.Option(min=1024, max=MOST, help="Length of the document.")] = 2048,
    questions: Facts = 3,
    seed: DocumentSeed = 0,
    save_document: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Keep the document in this file, to ask more about it."),
    ] = None,
) -> None:
    """Hide facts in a long document and ask for them with three caches: full, sink + window, SnapKV."""
    from rich.console import Console
    from rich.progress import track

    from ..policies import SnapKV
    from .progress import PALETTE, stderr_console

    console = Console(highlight=False, theme=PALETTE)
    loaded, tokenizer = load_model(model)
    document, facts = make_haystack(tokenizer, random.Random(seed), questions, tokens)
    if save_document is not None:
        _save(document, save_document)
    prompts = [question_prompt(tokenizer, document, fact.question) for fact in facts]
    budget = len(prompts[0]) // SHARE
    # The answers are short: with a lookahead the full cache would give them.
    snapkv = SnapKV(budget=budget, obs_window=32, lookahead=0)
    window = SnapKV(top_k=0, n_window=budget - SnapKV.n_sink, last_token=False)
    ways = {"full cache": None, "sink + window": window, "SnapKV": snapkv}
    console.print(
        f"A document of about {len(prompts[0]):,} tokens hides {len(facts)} facts. Each question below is asked on "
        f"three caches: all entries, and 1/{SHARE} of them ({budget} entries) chosen in two ways."
    )
    jobs = [(fact, prompt, way) for fact, prompt in zip(facts, prompts) for way in ways]
    answers: dict[str, list[Answer]] = {way: [] for way in ways}
    for fact, prompt, way in track(jobs, "asking", console=stderr_console(), transient=True):
        answers[way].append(_ask(loaded, tokenizer, prompt, fact, ways[way]))
    console.print(_answers_table(facts, answers))
    console.print(_figures_table(answers))
    file, question = "FILE", "QUESTION"
    if save_document is not None:
        file, question = shlex.quote(save_document), shlex.quote(facts[0].question)
    console.print(
        f"{'Try your own' if save_document is None else 'Ask again'}: {_command()} generate --model {model} "
        f"--prompt-file {file} --prompt {question} "
        f"--snapkv budget={budget},obs_window=32,lookahead=0",
        soft_wrap=True,
        markup=False,
    )


def _save(document: str, name: str) -> None:
    """Write the document to a file, unless there is another text in it.

    Raises:
        SnapKVError: there is, or it can't be written.
    """
    path = path_of(name, "--save-document")
    try:
        if path.exists() and path.read_bytes() != document.encode():
            raise SnapKVError(
                f"--save-document {name}: there is such a file already, give another name"
            )
        put(path, document)
    except OSError as error:
        raise SnapKVError(f"--save-document {name}: {reason(error)}") from error


def _ask(model, tokenizer, prompt: list[int], fact: Fact, policy: SnapKV | None) -> Answer:
    from mlx_lm.models.cache import make_prompt_cache

    from ..caches.layers import kv_bytes
    from ..engine.generate import stream_generate

    cache = make_prompt_cache(model)
    asked = stream_generate(model, tokenizer, prompt, 32, policy=policy, prompt_cache=cache)
    responses = list(asked)
    text, response = "".join(r.text for r in responses), responses[-1]
    return Answer(text.strip(), is_right(fact, text), response.generation_tps, kv_bytes(cache))


def _command() -> str:
    """How this program can be called from where the user is."""
    if shutil.which("mlx-snapkv"):
        return "mlx-snapkv"
    return f"{os.path.relpath(sys.executable)} -m mlx_snapkv"


def _answers_table(facts: list[Fact], answers: dict[str, list[Answer]]) -> Table:
    from rich.table import Table

    table = Table("question", "hidden", *answers, title="Answers", title_justify="left")
    for i, fact in enumerate(facts):
        cells = [_mark(a[i]) for a in answers.values()]
        table.add_row(f"the {fact.attribute} of the {fact.subject}", fact.value, *cells)
    return table


def _mark(answer: Answer) -> str:
    from rich.markup import escape

    line = answer.text.splitlines()[0] if answer.text else ""
    shown = line if len(line) <= 24 else line[:23] + "…"
    return f"[green]right[/] {escape(shown)}" if answer.right else f"[red]wrong[/] {escape(shown)}"


def _figures_table(answers: dict[str, list[Answer]]) -> Table:
    from rich.table import Table

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
