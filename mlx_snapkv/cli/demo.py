"""`mlx-snapkv demo`: ask for facts in a document, using three kinds of cache, and compare the caches' speed."""

from __future__ import annotations

import os
import random
import shlex
import shutil
import sys
import textwrap
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import SnapKVError
from ..paths import path_of, put, refusing
from ..planning.units import format_bytes
from .loading import load_model
from .options import MAX_PROMPT_TOKENS, DocumentSeed, Model, adapt_tokenizer

if TYPE_CHECKING:
    from rich.table import Table

    from ..demo.documents import Fact
    from ..planning.settings import Setting

REDUCTION = 16  # keep 1/16 of the entries, or read 1/16 per token
FULL_NAME, SNAPKV_NAME, SPARSE_NAME = (
    "full cache",
    f"1/{REDUCTION} kept",
    f"1/{REDUCTION} read (sparse)",
)
DECODED_ENTRIES = 32_768  # entries in the full cache when decoding is timed
DECODED_STEPS = 5  # tokens decoded for timing


def demo(
    model: Model = "demo",
    tokens: Annotated[
        int, typer.Option(min=1024, max=MAX_PROMPT_TOKENS, help="Length of the document.")
    ] = 2048,
    questions: Annotated[
        int, typer.Option(min=1, max=32, help="Number of facts to hide and ask for.")
    ] = 3,
    seed: DocumentSeed = 0,
    save_document: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Save the document to this file, to ask more about it."),
    ] = None,
) -> None:
    """Hide facts in a long document, ask for them with three kinds of cache, and time decoding.

    The first cache keeps all entries. The second keeps the 1/16 that the first question chooses. It can answer that
    question, but the entries that later questions need are gone. The third uses sparse attention: all entries stay, and
    every token of an answer chooses 1/16 of them to read.
    """
    from rich.console import Console
    from rich.progress import track

    from ..demo.questions import make_haystack, question_prompt
    from .progress import PALETTE, stderr_console

    console = Console(highlight=False, theme=PALETTE)
    loaded_model, tokenizer = load_model(model)
    adapt_tokenizer(tokenizer, None, {"enable_thinking": False})
    document, facts = make_haystack(tokenizer, random.Random(seed), questions, tokens)
    if save_document is not None:
        _save_document(document, save_document)
    n_prompt = len(question_prompt(tokenizer, document, facts[0].question))
    console.print(_introduction(n_prompt, len(facts)))
    chats = _chat_options(n_prompt)
    columns = [
        _ask_in_chat(loaded_model, tokenizer, document, facts, options)
        for options in track(chats.values(), "asking", console=stderr_console(), transient=True)
    ]
    console.print(_result_table(facts, dict(zip(chats, columns))))
    console.print(_decoding_speed_text(loaded_model))
    next_steps = _next_steps(model, save_document, facts[0].question, n_prompt)
    console.print(next_steps, soft_wrap=True, markup=False)


def _chat_options(n_prompt: int) -> dict[str, dict[str, Any]]:
    """Return the keyword arguments for each `Conversation`, keyed by table column."""
    from ..compress.policies import SnapKV
    from ..sparse.options import Sparse

    budget = n_prompt // REDUCTION
    snapkv = SnapKV(budget=budget, obs_window=32)
    sparse = Sparse(budget=budget, when="always")
    return {FULL_NAME: {}, SNAPKV_NAME: {"policy": snapkv}, SPARSE_NAME: {"sparse": sparse}}


def _introduction(n_prompt: int, n_facts: int) -> str:
    """Return an introduction to the three chats."""
    return (
        f"A document of about {n_prompt:,} tokens hides {n_facts} facts. Three chats ask for them one after the other: "
        f"with all entries, with 1/{REDUCTION} that SnapKV keeps, and with sparse attention: all entries stay, and "
        f"each token of the answer reads only the 1/{REDUCTION} that it chooses."
    )


def _result_table(facts: list[Fact], columns: dict[str, list[str]]) -> Table:
    """Return the result table, with one column per chat: its answers, then its statistics."""
    from rich.table import Table

    table = Table("question", "hidden", *columns)
    questions = [f"the {fact.attribute} of the {fact.subject}" for fact in facts]
    hidden_values = [fact.value for fact in facts]
    figures = [
        "right",
        "entries read by a token",
        "KV memory between turns",
    ]
    first_column = questions + figures
    second_column = hidden_values + [""] * len(figures)
    rows = zip(first_column, second_column, *columns.values())
    for number, cells in enumerate(rows, start=1):
        is_last_fact = number == len(facts)
        table.add_row(*cells, end_section=is_last_fact)
    return table


def _next_steps(model: str, document_file: str | None, question: str, n_prompt: int) -> str:
    """Suggest commands for the user's own model and text, and for the document if it was saved."""
    is_on_path = shutil.which("mlx-snapkv") is not None
    program = "mlx-snapkv" if is_on_path else f"{os.path.relpath(sys.executable)} -m mlx_snapkv"
    lines = [
        "To compare the caches on your own model and text, and to chat:",
        f"  {program} compare --model MODEL --prompt-file TEXT --prompt QUESTION",
        f"  {program} chat --model MODEL --policy auto",
    ]
    if document_file is not None:
        prompt_options = (
            f"--prompt-file {shlex.quote(document_file)} --prompt {shlex.quote(question)}"
        )
        command = f"{program} generate --model {model} {prompt_options}"
        snapkv_options = f"budget={n_prompt // REDUCTION},obs_window=32"
        lines.append(f"Ask again: {command} --snapkv {snapkv_options}")
    return "\n".join(lines)


def _save_document(document: str, name: str) -> None:
    """Write the document to a file. Raises: SnapKVError: the file exists with other content, or can't be written."""
    path = path_of(name, "--save-document")
    with refusing(f"--save-document {name}"):
        if path.exists() and path.read_bytes() != document.encode():
            raise SnapKVError(
                f"--save-document {name}: the file exists with other content, give another name"
            )
        put(path, document)


def _ask_in_chat(
    model: Any, tokenizer: Any, document: str, facts: list[Fact], options: dict[str, Any]
) -> list[str]:
    """Ask for all facts in one chat about the document.

    Returns: The cells of the chat's table column: the answers with rich markup, then the statistics.
    """
    from rich.markup import escape

    from ..caches.layers import kv_bytes
    from ..chat.conversation import Conversation
    from ..demo.questions import is_right

    chat = Conversation(model, tokenizer, max_tokens=32, **options)
    chat.attach(document)
    cells: list[str] = []
    n_right = 0
    for fact in facts:
        answer = "".join(response.text for response in chat.send(fact.question))
        judgement = "[red]wrong[/]"
        if is_right(fact, answer):
            judgement = "[green]right[/]"
            n_right += 1
        first_line, *_ = answer.strip().partition("\n")
        answer_text = textwrap.shorten(first_line, 24, placeholder="…")
        cells.append(f"{judgement} {escape(answer_text)}")
    read_per_token = chat.report.entries if chat.report is not None else 0
    if not read_per_token:  # the full cache's report has no entry count
        read_per_token = len(chat.read)
    memory_text = format_bytes(kv_bytes(chat.prompt_cache))
    return [*cells, f"{n_right}/{len(facts)}", f"{read_per_token:,}", memory_text]


def _decoding_speed_text(model: Any) -> str:
    """Time decoding over `DECODED_ENTRIES` random entries with the full cache, SnapKV and sparse attention.

    Returns: A sentence with each cache's time per token and KV memory.
    """
    from ..compress.options import Compress
    from ..compress.policies import SnapKV
    from ..measure.contenders import decoding_cache, full_and_policies
    from ..measure.speed import entries_bytes, time_steps_in_turn
    from ..sparse.options import Sparse

    budget = DECODED_ENTRIES // REDUCTION
    settings: list[Setting] = [Compress(SnapKV(budget=budget)), Sparse(budget=budget)]
    contenders = full_and_policies(DECODED_ENTRIES, settings)
    caches = [decoding_cache(model, contender, DECODED_ENTRIES) for contender in contenders]
    step_seconds = time_steps_in_turn(model, caches, DECODED_STEPS)
    # Ignore the first step, which is slower.
    full_seconds, *other_seconds = [median(seconds[1:]) for seconds in step_seconds]
    # With sparse attention, the size includes all entries, and once more what one token reads; see `entries_bytes`.
    full_size, *other_sizes = [format_bytes(entries_bytes(cache)) for cache in caches]
    snapkv_text, sparse_text = [
        f"{1000 * seconds:.1f} ms and {size} ({full_seconds / seconds:.1f} times as fast)"
        for seconds, size in zip(other_seconds, other_sizes)
    ]
    return (
        f"Decoding after {DECODED_ENTRIES:,} tokens ({DECODED_STEPS} steps, random entries) takes "
        f"{1000 * full_seconds:.1f} ms a token and {full_size} with all entries; "
        f"with 1/{REDUCTION} kept {snapkv_text}; with 1/{REDUCTION} read {sparse_text}."
    )
