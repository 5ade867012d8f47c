"""`mlx-snapkv eval fidelity`: how far predictions move when what came before them is compressed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from typer import Option

from .._version import __version__
from .loading import load_model
from .options import Model
from .results import Policies, ResultOptions, known, methods_of, results_in

QUESTIONS = (
    "Summarise the text above in three sentences.",
    "What is the main argument of this text?",
    "Which people, places or numbers does the text mention?",
)


@dataclass(frozen=True)
class FidelityOptions:
    """What is read, compressed and judged."""

    text: Annotated[
        list[str],
        Option(
            metavar="PATH",
            help="Text file, or folder of text files with all below it; repeat it for several.",
        ),
    ]
    policy: Policies
    model: Model = "demo"
    setting: Annotated[
        list[str] | None,
        Option(
            help="What is judged: how the text goes on (text), or the full cache's own answer to a question that the "
            "policy sees (known) or that comes after the compression (later). Repeat it for several. By default text."
        ),
    ] = None
    length: Annotated[
        int,
        Option(min=16, help="Tokens of a piece, which is compressed; a text may have several."),
    ] = 1400
    continuation: Annotated[
        int, Option(min=1, help="Tokens judged after each piece, or of an answer, at most.")
    ] = 64
    documents: Annotated[
        int, Option(min=1, help="Pieces, at most: the first of each text, then the second.")
    ] = 20
    question: Annotated[
        list[str] | None,
        Option(
            help="Question for the settings known and later; of several, each piece is asked one, in turn. "
            "By default three that suit any text."
        ),
    ] = None


def fidelity(*, options: FidelityOptions, result: ResultOptions) -> None:
    """Compare a model's predictions after a compressed prompt with those after the full one, on your own texts.

    It needs no questions with known answers. A piece is read once, whatever the number of policies.

    mlx-snapkv eval fidelity --model MODEL --text essays --policy snapkv:budget=25% --policy streaming_llm:budget=25%
    """
    from ..evals import fidelity as measuring
    from ..evals import fidelity_tables
    from ..evals.answering import require_compression
    from ..evals.texts import Texts
    from .progress import stderr_console

    settings = known("--setting", options.setting or [measuring.TEXT], measuring.SETTINGS)
    methods = methods_of(options.policy)
    require_compression(methods, [options.length])
    texts = Texts(options.text)
    # The full cache is asked for the first token after a piece; it is fed, and those after it are judged.
    n_following = options.continuation + 1
    texts.require_length(options.length + n_following)
    files = result.files()
    model, tokenizer = load_model(options.model)
    pieces = texts.pieces(tokenizer, options.length, n_following, options.documents)
    if texts.left_out is not None:
        stderr_console().print(texts.left_out, soft_wrap=True)
    questions = options.question or list(QUESTIONS)
    comparison = measuring.Comparison(pieces, methods, settings, questions, options.continuation)
    fixed = {
        "task": "fidelity",
        "text": options.text,
        "texts": texts.digest,
        "length": options.length,
        "continuation": options.continuation,
        "questions": questions,
        "model": options.model,
        "mlx-snapkv": __version__,
    }
    ask = partial(measuring.run, model, tokenizer, comparison)

    def show(found: dict[str, Any]) -> Any:
        return fidelity_tables.tables(found["summary"]), fidelity_tables.markdown(found), []

    summarise = fidelity_tables.summarise
    results = results_in(files, fixed, measuring.KEYS)
    result.measure(files, fixed, results, len(pieces), ask, summarise, show)
