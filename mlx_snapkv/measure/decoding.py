"""A greedy answer decoded from what is kept of its prompt."""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..caches.layers import held_tokens
from ..engine.generate import stream_generate
from ..engine.report import CompressionReport

Kept = tuple[list, CompressionReport | None]  # None if what it has not been fed is compressed, too


@dataclass(frozen=True)
class Answer:
    """A greedy answer."""

    text: str
    tokens: list[int]  # with the one that ends it, if that came
    cache: list  # the prompt cache that it was given; with a `memory`, of all entries
    report: CompressionReport
    times: list[float]  # when decoding began, and when each token came that was decoded
    n_before: int  # so many of these are before the compression


def decode(
    model: Any,
    tokenizer: Any,
    prompt: Sequence[int],
    begun: Sequence[int],
    kept: Kept,
    max_tokens: int,
    on_text: Callable[[str], None] = lambda text: None,
    on_report: Callable[[CompressionReport], None] = lambda report: None,
    **options: Any,
) -> Answer:
    """The greedy answer that goes on from a cache which has been fed the first tokens of prompt and answer.

    Args:
        begun: the answer's first tokens.
        on_text: called with the text as it comes, without the token that ends it.
        on_report: called when a prompt has been compressed.
        **options: of `stream_generate`, where what is kept has no report yet.
    """
    cache, report = kept
    detokenizer, stops = tokenizer.detokenizer, tokenizer.eos_token_ids
    tokens: list[int] = []
    times = [time.perf_counter()]
    n_before = 0

    def compressed(found: CompressionReport) -> None:
        nonlocal n_before, report
        report, n_before = found, len(times)
        on_report(found)

    def decoded() -> Iterator[int]:
        rest = [*prompt, *begun][held_tokens(model, cache) :]
        keywords = {"on_report": compressed, **options} if report is None else {}
        n_left = max_tokens - len(begun)
        for response in stream_generate(
            model, tokenizer, rest, n_left, prompt_cache=cache, **keywords
        ):
            times.append(time.perf_counter())
            yield response.token

    ended = len(begun) >= max_tokens or (begun and begun[-1] in stops)
    for token in itertools.chain(begun, [] if ended else decoded()):
        tokens.append(token)
        if token not in stops:
            detokenizer.add_token(token)
            on_text(detokenizer.last_segment)
    detokenizer.finalize()
    on_text(detokenizer.last_segment)
    assert report is not None
    return Answer(detokenizer.text, tokens, cache, report, times, n_before)
