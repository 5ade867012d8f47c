"""`mlx-snapkv eval fidelity`: how far predictions move when what came before them is compressed."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .._version import __version__
from . import asking, flags
from .loading import load_model
from .options import ResultFiles, with_suffix, write_result

if TYPE_CHECKING:
    from ..evals.fidelity import Comparison
    from ..evals.results import Results

QUESTIONS = (
    "Summarise the text above in three sentences.",
    "What is the main argument of this text?",
    "Which people, places or numbers does the text mention?",
)


def fidelity(
    text: Annotated[
        list[str],
        typer.Option(
            metavar="PATH",
            help="Text file, or folder of text files with all below it; repeat it for several.",
        ),
    ],
    policy: Annotated[
        list[str],
        typer.Option(
            metavar="POLICY",
            help="As for generate, such as keydiff:budget=12.5%, a share of the prompt; repeat it to compare several.",
        ),
    ],
    model: flags.Model = "demo",
    setting: Annotated[
        list[str] | None,
        typer.Option(
            help="What is judged: how the text goes on (text), or the full cache's own answer to a question that the "
            "policy sees (known) or that comes after the compression (later). Repeat it for several. By default text."
        ),
    ] = None,
    length: Annotated[
        int,
        typer.Option(
            min=16, help="Tokens of a piece, which is compressed; a text may have several."
        ),
    ] = 1400,
    continuation: Annotated[
        int, typer.Option(min=1, help="Tokens judged after each piece, or of an answer, at most.")
    ] = 64,
    documents: Annotated[
        int, typer.Option(min=1, help="Pieces, at most: the first of each text, then the second.")
    ] = 20,
    question: Annotated[
        list[str] | None,
        typer.Option(
            help="Question for the settings known and later; of several, each piece is asked one, in turn. "
            "By default three that suit any text."
        ),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Write NAME.jsonl as pieces are judged, and go on from it if it is there; at the end NAME.json and "
            "NAME.md.",
        ),
    ] = None,
    as_json: flags.AsJson = False,
) -> None:
    """Compare a model's predictions after a compressed prompt with those after the full one, on your own texts.

    It needs no questions with known answers. A piece is read once, whatever the number of policies.

    mlx-snapkv eval fidelity --model MODEL --text essays --policy snapkv:budget=25% --policy streaming_llm:budget=25%
    """
    from ..evals import fidelity as measuring
    from ..evals.texts import Texts
    from ..policies import resolve_policy
    from .progress import stderr_console

    settings = asking.known("--setting", setting or [measuring.TEXT], list(measuring.SETTINGS))
    chosen = (resolve_policy(policy=given) for given in policy)
    methods = {measuring.FULL: None} | {str(one): one for one in chosen}
    measuring.require_compression(methods, length)
    texts = Texts(text)
    # The full cache is asked for the first token after a piece; it is fed, and those after it are judged.
    n_following = continuation + 1
    texts.require_length(length + n_following)
    files = asking.output_files(output, (".jsonl", ".json", ".md"))
    loaded, tokenizer = load_model(model)
    measuring.require_room(loaded, methods, length)
    pieces = texts.pieces(tokenizer, length, n_following, documents)
    if texts.left_out is not None:
        stderr_console().print(texts.left_out, soft_wrap=True)
    questions = question or list(QUESTIONS)
    comparison = measuring.Comparison(pieces, methods, settings, questions, continuation)
    fixed = {
        "task": "fidelity",
        "text": text,
        "texts": texts.digest,
        "length": length,
        "continuation": continuation,
        "questions": questions,
        "model": model,
        "mlx-snapkv": __version__,
    }
    _measure(loaded, tokenizer, comparison, fixed, files, as_json)


def _measure(
    model: Any,
    tokenizer: Any,
    comparison: Comparison,
    fixed: dict[str, Any],
    files: ResultFiles | None,
    as_json: bool,
) -> None:
    """Judge all, print the tables, and write the files."""
    from ..evals import fidelity_tables
    from ..evals.fidelity import KEYS
    from ..evals.results import Results
    from ..reporting.setting import setting as measured
    from .print_table import print_table

    answers = None if files is None else with_suffix(files.base, ".jsonl")
    results = Results(fixed, answers, KEYS)
    records = _run(model, tokenizer, comparison, results, answers)
    summary = fidelity_tables.summarise(records)
    about = {"command": shlex.join(["mlx-snapkv", *sys.argv[1:]]), **fixed, **measured()}
    result = {**about, "summary": summary, "records": records}
    if as_json:
        print(json.dumps(result))
    else:
        for table in fidelity_tables.tables(summary):
            print_table(table)
    if files is not None:
        written = write_result(files.base, result, fidelity_tables.markdown(result))
        print(files.told(written), file=sys.stderr if as_json else sys.stdout)


def _run(
    model: Any,
    tokenizer: Any,
    comparison: Comparison,
    results: Results,
    answers: Path | None,
) -> list[dict[str, Any]]:
    from ..evals.fidelity import run
    from .progress import DocumentBar

    try:
        with DocumentBar(len(comparison.pieces), asking.LINE_EVERY) as bar:
            return run(model, tokenizer, comparison, results, bar.done)
    except KeyboardInterrupt:
        if answers is not None:
            asking.tell_how_to_go_on(answers, bar.console)
        raise
