"""`mlx-snapkv eval fidelity`: measure how much compressing a text changes a model's predictions."""

import sys
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from typer import Option

from ..errors import SnapKVError
from .loading import load_model
from .options import Model, one_of
from .results import Policies, ResultOptions, Sparses, methods_to_measure

QUESTIONS = (
    "Summarise the text above in three sentences.",
    "What is the main argument of this text?",
    "Which people, places or numbers does the text mention?",
)


@dataclass(frozen=True, kw_only=True)
class FidelityOptions:
    """Options for `eval fidelity`: texts, methods and settings."""

    text: Annotated[
        list[str], Option(help="Text file, or folder of text files (recursive); repeatable.")
    ]
    policy: Policies = None
    sparse: Sparses = None
    model: Model = "demo"
    setting: Annotated[
        list[str] | None,
        Option(
            parser=one_of("text", "known", "later"),
            help="What is scored: how the text continues (text), or the full cache's own answer to a question that "
            "the policy sees (known) or that comes after the compression (later); repeatable. Default: text.",
        ),
    ] = None
    length: Annotated[
        int,
        Option(
            min=16, help="Tokens per piece, which is compressed; a text may give several pieces."
        ),
    ] = 1400
    continuation: Annotated[
        int, Option(min=1, help="Tokens to score after a piece, or maximum tokens of an answer.")
    ] = 64
    documents: Annotated[
        int,
        Option(
            min=1,
            help="Maximum number of pieces: the first of each text, then the second of each, and so on.",
        ),
    ] = 20
    question: Annotated[
        list[str] | None,
        Option(
            help="Question for the settings known and later; repeatable, the pieces then take turns. Default: three "
            "questions that suit any text."
        ),
    ] = None


def fidelity(*, options: FidelityOptions, result: ResultOptions) -> None:
    """Measure on your own texts how much a model's predictions change when the prompt is compressed.

    No questions with known answers are needed. Policies that choose after prefill share one pass over each piece of
    text.

    mlx-snapkv eval fidelity --model MODEL --text essays --policy snapkv:budget=25% --policy keydiff:budget=25%
    """
    from ..measure import fidelity as measuring
    from ..measure.texts import Texts

    settings = list(dict.fromkeys(options.setting or [measuring.TEXT]))
    methods = methods_to_measure(options.policy, options.sparse, lengths=[options.length])
    if len(methods) == 1:
        raise SnapKVError(
            "eval fidelity needs --policy or --sparse: what is compared with the full cache"
        )
    texts = Texts(options.text)
    if texts.n_unread:
        print(f"Skipped files that are not UTF-8 text: {texts.n_unread}.", file=sys.stderr)
    files = result.files()
    model, tokenizer = load_model(options.model)
    # The first token after a piece is not scored, because prefill predicts it, before the compression.
    n_following = options.continuation + 1
    pieces = texts.pieces(tokenizer, options.length, n_following, options.documents)
    questions = options.question or list(QUESTIONS)
    shared_fields = {
        "task": "fidelity",
        "text": options.text,
        "length": options.length,
        "continuation": options.continuation,
        "model": options.model,
        "texts": texts.digest,
        "questions": questions,
        # Says which tokens are scored, so that a result file with scores for other tokens is rejected.
        "judged": measuring.JUDGED_TOKENS,
    }
    run = partial(
        measuring.run,
        model,
        tokenizer,
        pieces,
        methods,
        settings,
        questions,
        options.continuation,
    )
    result.measure(files, shared_fields, len(pieces), run, measuring.FIDELITY_PAGE)
