"""Measure how far answers are from the full cache's, by the position in the answer; writes docs/modes.json and .png.

    make real-models
    python scripts/measure_modes.py --models real-models/smollm2-135m-instruct
    python scripts/measure_modes.py --question "Summarise the text above." --out docs/modes-asked; make docs

Each mode reads a text, and is fed the tokens that follow in the text, one by one. With a question, it is fed the full
cache's own answer instead. Its predictions are compared with the full cache's. A policy chooses once which entries
stay; sparse attention chooses for every token which entries it reads.
"""

import itertools
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy_attention
from results_page import ROOT, Result, Row, shared_options

from mlx_snapkv import generate_step
from mlx_snapkv.cli.loading import load_model
from mlx_snapkv.measure.divergence import divergence, log_softmax
from mlx_snapkv.measure.tables import grouped, put_figure
from mlx_snapkv.measure.texts import Piece, Texts, frame_of

MODES = {
    "SnapKV, 1/8": {"policy": "snapkv:budget=12.5%"},
    "StreamingLLM, 1/8": {"policy": "streaming_llm:budget=12.5%,schedule=once"},
    "sparse, 1/16": {"sparse": "budget=6.25%,when=always"},
}
LOOKAHEADS = {
    f"SnapKV, 1/8, lookahead={n}": n for n in (16, 32)
}  # further modes for answers to a question
# Bounds of the spans of positions in an answer. The full cache gives the first two tokens.
EDGES = (2, 8, 32, 96, 256, 512)
# Bounds for answers to a question: a span up to the end of the longest lookahead, and one after it.
ASKED = (2, 34, 66)


def predictions(model, prompt: list[int], following: list[int], **options: Any) -> mx.array:
    """Return log-probabilities `(n, vocab_size)` at the tokens that follow a prompt."""
    tokens = itertools.chain(following, itertools.repeat(0))
    found = []
    options |= {"sampler": lambda _: mx.array([next(tokens)]), "max_tokens": len(following)}
    for _, logprobs in generate_step(mx.array(prompt), model, **options):
        found.append(logprobs.astype(mx.float32))
        mx.eval(found[-1])
    return log_softmax(mx.stack(found))


def compare_tokens(
    model,
    prompt: list[int],
    following: list[int],
    modes: dict[str, dict[str, Any]],
    edges: tuple[int, ...],
) -> Iterator[Row]:
    """Yield the KL by mode and span, for the spans that `following` covers."""
    full = predictions(model, prompt, following)
    for mode, options in modes.items():
        each = divergence(full, predictions(model, prompt, following, **options))
        for start, stop in itertools.pairwise(edges):
            if stop <= len(following):
                kl = float(each[start:stop].mean())
                yield {"mode": mode, "start": start, "stop": stop, "kl": kl}


def answer(model, tokenizer, prompt: list[int], most: int) -> list[int]:
    """Return the full cache's own answer, at most `most` tokens."""
    found = (token for token, _ in generate_step(mx.array(prompt), model, max_tokens=most))
    return list(itertools.takewhile(lambda token: token not in tokenizer.eos_token_ids, found))


def compare_texts(model, tokenizer, pieces: Iterable[Piece], question: str | None) -> Iterator[Row]:
    """Yield the KL of the tokens after each piece of text, or of answers to the question."""
    frame = frame_of(tokenizer, question)
    for piece in pieces:
        if question is None:
            yield from compare_tokens(model, piece.tokens, piece.following, MODES, EDGES)
            continue
        prompt = [*frame.before, *piece.tokens, *frame.after]
        ahead = {
            name: {"policy": f"snapkv:budget=12.5%,lookahead={n}"} for name, n in LOOKAHEADS.items()
        }
        found = answer(model, tokenizer, prompt, ASKED[-1])
        yield from compare_tokens(model, prompt, found, MODES | ahead, ASKED)


def means(rows: list[Row]) -> Iterator[Row]:
    """Yield the mean KL by mode and span, over `n` pieces."""
    for (mode, start, stop), own in grouped(rows, "mode", "start", "stop").items():
        kl = statistics.mean(row["kl"] for row in own)
        yield {"mode": mode, "start": start, "stop": stop, "n": len(own), "kl": kl}


def figure(rows: list[Row]) -> Any:
    """Return matplotlib's figure of KL by position, with a line for each mode."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(6.4, 4), layout="constrained")
    axes = drawn.subplots()
    for (mode,), mine in grouped(rows, "mode").items():
        axes.plot([r["stop"] for r in mine], [r["kl"] for r in mine], label=mode, marker="o")
    axes.set(xlabel="tokens of the answer", ylabel="KL to the full cache (nats a token)")
    axes.set(xscale="log", yscale="log")
    spans = sorted({(row["start"], row["stop"]) for row in rows})
    axes.set_xticks(
        [stop for _, stop in spans], [f"{start + 1} to {stop}" for start, stop in spans]
    )
    axes.grid(alpha=0.3)
    axes.legend()
    return drawn


def main() -> None:
    """Measure each model, add its rows, and draw the figure."""
    numpy_attention.install()
    parser = shared_options(__doc__, "modes")
    parser.set_defaults(models=["real-models/smollm2-135m-instruct"])
    parser.add_argument("--text", type=Path, default=ROOT / "real-models" / "essays")
    parser.add_argument("--length", type=int, default=1400, help="tokens of a prompt")
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--question", help="judge the full cache's own answers to it")
    args = parser.parse_args()
    result = Result(args.out, length=args.length, documents=args.documents)
    for name in args.models:
        model, tokenizer = load_model(name)
        pieces = Texts([str(args.text)]).pieces(tokenizer, args.length, EDGES[-1], args.documents)
        rows = list(means(list(compare_texts(model, tokenizer, pieces, args.question))))
        for row in rows:
            result.add({"model": Path(name).name} | row)
        if args.question is None:
            put_figure(args.out.with_suffix(".png"), figure(rows))


if __name__ == "__main__":
    main()
