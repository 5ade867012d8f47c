"""`mlx-snapkv eval fidelity`: how far predictions move when what came before them is compressed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

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
    from ..evals.fidelity_tables import PAGE
    from ..evals.texts import Texts
    from .progress import stderr_console

    settings = known("--setting", options.setting or [measuring.TEXT], measuring.SETTINGS)
    methods = methods_of(options.policy, [options.length])
    texts = Texts(options.text)
    if texts.n_unread:
        left_out = f"Files left out: {texts.n_unread} not UTF-8 text."
        stderr_console().print(left_out, soft_wrap=True)
    files = result.files()
    model, tokenizer = load_model(options.model)
    # The full cache is asked for the first token after a piece; it is fed, and those after it are judged.
    n_following = options.continuation + 1
    pieces = texts.pieces(tokenizer, options.length, n_following, options.documents)
    questions = options.question or list(QUESTIONS)
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
    asked = pieces, methods, settings, questions, options.continuation
    ask = partial(measuring.run, model, tokenizer, *asked)
    results = results_in(files, fixed, measuring.KEYS)
    result.measure(files, fixed, results, len(pieces), ask, PAGE)
