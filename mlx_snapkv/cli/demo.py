"""`mlx-snapkv demo`: the same questions with the full cache, with sink and window alone, and with SnapKV."""

from __future__ import annotations

import os
import random
import shlex
import shutil
import sys
from dataclasses import dataclass
from statistics import median_high
from typing import TYPE_CHECKING, Annotated

import typer

from ..demo.documents import Fact
from ..demo.questions import is_right, make_haystack, question_prompt
from ..engine.report import format_bytes
from ..errors import SnapKVError
from ..paths import path_of, put, refusing
from .loading import load_model
from .options import MOST, DocumentSeed, Facts, Model

if TYPE_CHECKING:
    from rich.table import Table

    from ..policies import SnapKV

SHARE = 16  # one entry in so many is kept
FULL = "full cache"


@dataclass
class Answer:
    text: str
    right: bool
    tokens_per_second: float
    kv_bytes: int

    @property
    def mark(self) -> str:
        """Whether it is right, and its beginning, in rich's markup."""
        from rich.markup import escape

        line = self.text.partition("\n")[0]
        shown = escape(line if len(line) <= 24 else line[:23] + "…")
        return f"[green]right[/] {shown}" if self.right else f"[red]wrong[/] {shown}"


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
    window = SnapKV(top_k=0, n_window=budget - SnapKV.n_sink, lookahead=0)
    ways = {FULL: None, "sink + window": window, "SnapKV": snapkv}
    console.print(
        f"A document of about {len(prompts[0]):,} tokens hides {len(facts)} facts. Each question below is asked on "
        f"three caches: all entries, and 1/{SHARE} of them ({budget} entries) chosen in two ways."
    )
    jobs = [(fact, prompt, way) for fact, prompt in zip(facts, prompts) for way in ways]
    answers: dict[str, list[Answer]] = {way: [] for way in ways}
    for fact, prompt, way in track(jobs, "asking", console=stderr_console(), transient=True):
        answers[way].append(_ask(loaded, tokenizer, prompt, fact, ways[way]))
    for table in _tables(facts, answers):
        console.print(table)
    file, question, how = "FILE", "QUESTION", "Try your own"
    if save_document is not None:
        file, question, how = (
            shlex.quote(save_document),
            shlex.quote(facts[0].question),
            "Ask again",
        )
    program = f"{os.path.relpath(sys.executable)} -m mlx_snapkv"
    if shutil.which("mlx-snapkv"):
        program = "mlx-snapkv"
    command = f"{program} generate --model {model} --prompt-file {file} --prompt {question}"
    options = f"--snapkv budget={budget},obs_window=32,lookahead=0"
    console.print(f"{how}: {command} {options}", soft_wrap=True, markup=False)


def _save(document: str, name: str) -> None:
    """Write the document to a file, unless there is another text in it."""
    path = path_of(name, "--save-document")
    with refusing(f"--save-document {name}"):
        if path.exists() and path.read_bytes() != document.encode():
            raise SnapKVError(
                f"--save-document {name}: there is such a file already, give another name"
            )
        put(path, document)


def _ask(model, tokenizer, prompt: list[int], fact: Fact, policy: SnapKV | None) -> Answer:
    from mlx_lm.models.cache import make_prompt_cache

    from ..caches.layers import kv_bytes
    from ..engine.generate import stream_generate

    cache = make_prompt_cache(model)
    responses = list(
        stream_generate(model, tokenizer, prompt, 32, policy=policy, prompt_cache=cache)
    )
    text = "".join(response.text for response in responses)
    speed = responses[-1].generation_tps
    return Answer(text.strip(), is_right(fact, text), speed, kv_bytes(cache))


def _tables(facts: list[Fact], answers: dict[str, list[Answer]]) -> list[Table]:
    from rich.table import Table

    asked = Table("question", "hidden", *answers, title="Answers", title_justify="left")
    for fact, *given in zip(facts, *answers.values()):
        marks = (answer.mark for answer in given)
        asked.add_row(f"the {fact.attribute} of the {fact.subject}", fact.value, *marks)
    figures = Table("cache", title="Figures", title_justify="left")
    for name in ("right", "tokens/s", "KV memory", "ratio"):
        figures.add_column(name, justify="right")
    for way, found in answers.items():
        size = found[0].kv_bytes
        ratio = "" if way == FULL else f"{answers[FULL][0].kv_bytes / size:.1f}x smaller"
        right = f"{sum(answer.right for answer in found)}/{len(found)}"
        speed = f"{median_high(answer.tokens_per_second for answer in found):,.0f}"
        figures.add_row(way, right, speed, format_bytes(size), ratio)
    return [asked, figures]
