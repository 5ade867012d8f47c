"""Measure how far long answers are from the full cache's, by position. Writes docs/long-answers.json and .png.

    make real-models
    python scripts/measure_long_answers.py; make docs

Each method reads a text and a request for a summary or a program. Forced: the method is fed the full cache's own
answer, and its predictions are compared with the full cache's. Free: the method writes its own answer, and the position
of the first token that differs from the full cache's answer is recorded.
"""

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy_attention
from measure_associations import METHODS
from mlx_lm.models.cache import make_prompt_cache
from results_page import ROOT, Result, Row, result_options

from mlx_snapkv.caches.layers import n_tokens
from mlx_snapkv.cli.loading import load_model
from mlx_snapkv.engine.token_ids import common_prefix
from mlx_snapkv.measure.compare import decode
from mlx_snapkv.measure.divergence import Reference, divergence
from mlx_snapkv.measure.methods import Method
from mlx_snapkv.measure.reading import Reading, read_once
from mlx_snapkv.measure.tables import grouped, put_figure
from mlx_snapkv.measure.texts import Texts, frame_of
from mlx_snapkv.planning.settings import setting_named

SPAN = 64  # tokens averaged for each point in the picture
# Kind of answer -> folder of its texts, and the request.
REQUESTS = {
    "summary": ("essays", "Write a detailed summary of the text above, paragraph by paragraph."),
    "program": (
        "code",
        "Write a long Python program with tests that does what the code above does.",
    ),
}


def answers(
    model: Any, tokenizer: Any, reading: Reading, method: Method, full_answer: Sequence[int]
) -> tuple[mx.array, list[int]]:
    """Return a method's predictions for the full cache's answer, and the method's own answer.

    Args:
        model: an mlx-lm model.
        tokenizer: its tokenizer.
        reading: the prompt, read for all policies that share a reading.
        method: a policy or sparse attention.
        full_answer: the full cache's answer.

    Returns: Log-probabilities `(m, vocab_size)` for the last `m` tokens of `full_answer`, and the free answer's tokens.
    """
    reference = Reference(reading, full_answer)
    max_tokens = len(full_answer)
    if not method.shares_reading:
        cache = make_prompt_cache(model)
        answer = decode(model, tokenizer, reading.tokens, max_tokens, cache, policy=method.policy)
        return reference.generate(method.policy), answer.tokens
    cache, report = reading.compress(method.policy, answering=True)
    logprobs = reference.predictions(copy.deepcopy(cache))
    n_known = n_tokens(cache) - len(reading.tokens) + 1
    first_tokens = full_answer[:n_known]
    answer = decode(model, tokenizer, reading.tokens, max_tokens, cache, report, first_tokens)
    return logprobs, answer.tokens


def compared(
    full_answer: Sequence[int],
    full_logprobs: mx.array,
    logprobs: mx.array,
    free_answer: list[int],
) -> Row:
    """Return a method's figures for one answer.

    Args:
        full_answer: the full cache's answer, `n` tokens.
        full_logprobs: the full cache's log-probabilities `(n, vocab_size)`.
        logprobs: the method's log-probabilities for the last tokens of the answer.
        free_answer: the method's own answer.

    Returns: Lists of `kl` in nats and `same` (0 or 1) for the last tokens of the answer; the answer's length `tokens`;
        and `differs`, the position of the first token that differs.
    """
    full_logprobs = full_logprobs[-len(logprobs) :]
    is_same = mx.argmax(full_logprobs, axis=-1) == mx.argmax(logprobs, axis=-1)
    return {
        "tokens": len(full_answer),
        "kl": divergence(full_logprobs, logprobs).tolist(),
        "same": is_same.tolist(),
        "differs": common_prefix([full_answer, free_answer]),
    }


def by_position(rows: Sequence[Row], longest: int) -> Iterator[Row]:
    """Yield the mean `kl` and `same` for each span of positions, over the `n` tokens that answers have there."""
    for start in range(0, longest, SPAN):
        stop = start + SPAN
        span_kl: list[float] = []
        span_same: list[float] = []
        for row in rows:
            first = row["tokens"] - len(row["kl"])  # earlier tokens were decoded on all entries
            in_span = slice(max(0, start - first), max(0, stop - first))
            span_kl += row["kl"][in_span]
            span_same += row["same"][in_span]
        n_tokens = len(span_kl)
        if n_tokens > 0:
            means = {"kl": sum(span_kl) / n_tokens, "same": sum(span_same) / n_tokens}
            yield {"start": start, "stop": stop, "n": n_tokens, **means}


def measure(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[list[int]],
    methods: Sequence[Method],
    max_tokens: int,
) -> Iterator[Row]:
    """Yield a row per method: its figures by position, and where its free answers first differ."""
    rows_by_method: dict[str, list[Row]] = {method.name: [] for method in methods}
    policies = [method.policy for method in methods if method.shares_reading]
    for prompt in prompts:
        reading = read_once(model, prompt, policies)
        full_answer = reading.answer(max_tokens, tokenizer.eos_token_ids)
        full_logprobs = Reference(reading, full_answer).logprobs
        for method in methods:
            logprobs, free_answer = answers(model, tokenizer, reading, method, full_answer)
            row = compared(full_answer, full_logprobs, logprobs, free_answer)
            rows_by_method[method.name].append(row)
    for name, rows in rows_by_method.items():
        yield {
            "method": name,
            "tokens": [row["tokens"] for row in rows],
            "differs": [row["differs"] for row in rows],
            "spans": list(by_position(rows, max_tokens)),
        }


def figure(rows: list[Row]) -> Any:
    """Return a matplotlib figure of KL and equal tokens by position, with one column per model and kind."""
    from matplotlib.figure import Figure

    columns = grouped(rows, "model", "kind")
    picture = Figure(figsize=(4.2 * len(columns), 6), layout="constrained")
    panels = picture.subplots(2, len(columns), squeeze=False, sharex=True, sharey="row")
    for (upper, lower), ((model, kind), method_rows) in zip(panels.T, columns.items()):
        for row in method_rows:
            spans = row["spans"]
            middles = [(span["start"] + span["stop"]) / 2 for span in spans]
            upper.plot(middles, [span["kl"] for span in spans], label=row["method"], marker=".")
            lower.plot(middles, [span["same"] for span in spans], marker=".")
        upper.set(title=f"{kind}, {model}", yscale="log")
        lower.set(xlabel="position in the answer (tokens)", ylim=(0, 1.02))
        for axes in (upper, lower):
            axes.grid(alpha=0.3)
    panels[0, 0].set_ylabel("KL to the full cache (nats a token)")
    panels[1, 0].set_ylabel("share of equal tokens")
    handles = panels[0, 0].get_legend_handles_labels()
    picture.legend(*handles, loc="outside lower center", ncols=2, fontsize=8)
    return picture


def main() -> None:
    """Measure each model, add its rows, and draw the picture."""
    numpy_attention.install()
    parser = result_options(__doc__, "long-answers")
    parser.add_argument("--models", nargs="+", default=["real-models/smollm2-135m-instruct"])
    parser.add_argument("--folder", type=Path, default=ROOT / "real-models", help="essays and code")
    parser.add_argument("--kinds", nargs="+", choices=REQUESTS, default=[*REQUESTS])
    parser.add_argument("--length", type=int, default=1400, help="tokens of a text")
    parser.add_argument("--texts", type=int, default=2, help="texts of each kind")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of an answer, at most")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    args = parser.parse_args()
    methods = [Method(setting_named(text)) for text in args.methods]
    result = Result(args.out, length=args.length, texts=args.texts)
    rows: list[Row] = []
    for name in args.models:
        model, tokenizer = load_model(name)
        for kind in args.kinds:
            folder, request = REQUESTS[kind]
            frame = frame_of(tokenizer, request)
            texts = Texts([str(args.folder / folder)])
            pieces = texts.pieces(tokenizer, args.length, 0, args.texts)
            prompts = [[*frame.before, *piece.tokens, *frame.after] for piece in pieces]
            for figures in measure(model, tokenizer, prompts, methods, args.tokens):
                row = {"model": Path(name).name, "kind": kind} | figures
                rows.append(row)
                result.add(row)
    put_figure(args.out.with_suffix(".png"), figure(rows))


if __name__ == "__main__":
    main()
