"""Measure how far long answers are from the full cache's, by position. Writes docs/long-answers.json and .png.

    make real-models
    python scripts/measure_long_answers.py --models real-models/smollm2-135m-instruct; make docs

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
from results_page import ROOT, Result, Row, shared_options

from mlx_snapkv.caches.layers import n_tokens_read
from mlx_snapkv.cli.loading import load_model
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
    model: Any, tokenizer: Any, reading: Reading, method: Method, full: Sequence[int]
) -> tuple[mx.array, list[int]]:
    """Return a method's predictions for the full cache's answer, and the method's own answer.

    Args:
        model: an mlx-lm model.
        tokenizer: its tokenizer.
        reading: the prompt, read for all policies that share a reading.
        method: a policy or sparse attention.
        full: the full cache's answer.

    Returns: Log-probabilities `(m, vocab_size)` for the last `m` tokens of `full`, and the free answer's tokens.
    """
    reference = Reference(reading, full)
    if not method.shares_reading:
        cache, options = make_prompt_cache(model), {"policy": method.policy}
        answer = decode(model, tokenizer, reading.tokens, len(full), cache, **options)
        return reference.generate(method.policy), answer.tokens
    cache, report = reading.compress(method.policy, answering=True)
    found = reference.predictions(copy.deepcopy(cache))
    begun = full[: n_tokens_read(model, cache) - len(reading.tokens) + 1]
    answer = decode(model, tokenizer, reading.tokens, len(full), cache, report, begun)
    return found, answer.tokens


def compared(full: Sequence[int], expected: mx.array, found: mx.array, free: list[int]) -> Row:
    """Return a method's figures for one answer.

    Args:
        full: the full cache's answer, `n` tokens.
        expected: the full cache's log-probabilities `(n, vocab_size)`.
        found: the method's log-probabilities for the last tokens of the answer.
        free: the method's own answer.

    Returns: Lists of `kl` in nats and `same` (0 or 1) for the last tokens of the answer; the answer's length `tokens`;
        and `differs`, the position of the first token that differs.
    """
    expected = expected[-len(found) :]
    same = mx.argmax(expected, axis=-1) == mx.argmax(found, axis=-1)
    pairs = enumerate(zip(full, free))
    differs = next((i for i, (theirs, ours) in pairs if theirs != ours), min(len(full), len(free)))
    kl = divergence(expected, found).tolist()
    return {"tokens": len(full), "kl": kl, "same": same.tolist(), "differs": differs}


def by_position(rows: Sequence[Row], longest: int) -> Iterator[Row]:
    """Yield the mean `kl` and `same` for each span of positions, over the `n` tokens that answers have there."""
    for start in range(0, longest, SPAN):
        here = []
        for row in rows:
            first = row["tokens"] - len(row["kl"])  # earlier tokens were decoded on all entries
            judged = zip(range(first, row["tokens"]), row["kl"], row["same"])
            here += [(kl, same) for i, kl, same in judged if start <= i < start + SPAN]
        if here:
            kl, same = (sum(each) / len(here) for each in zip(*here))
            yield {"start": start, "stop": start + SPAN, "n": len(here), "kl": kl, "same": same}


def measure(
    model: Any, tokenizer: Any, prompts: Sequence[list[int]], methods: Sequence[Method], most: int
) -> Iterator[Row]:
    """Yield a row per method: its figures by position, and where its free answers first differ."""
    found: dict[str, list[Row]] = {method.name: [] for method in methods}
    for prompt in prompts:
        reading = read_once(model, prompt, [m.policy for m in methods if m.shares_reading])
        full = reading.answer(most, tokenizer.eos_token_ids)
        expected = Reference(reading, full).logprobs
        for method in methods:
            row = compared(full, expected, *answers(model, tokenizer, reading, method, full))
            found[method.name].append(row)
    for name, rows in found.items():
        tokens, differs = ([row[key] for row in rows] for key in ("tokens", "differs"))
        spans = list(by_position(rows, most))
        yield {"method": name, "tokens": tokens, "differs": differs, "spans": spans}


def figure(rows: list[Row]) -> Any:
    """Return a matplotlib figure of KL and equal tokens by position, with one column per model and kind."""
    from matplotlib.figure import Figure

    columns = grouped(rows, "model", "kind")
    drawn = Figure(figsize=(4.2 * len(columns), 6), layout="constrained")
    panels = drawn.subplots(2, len(columns), squeeze=False, sharex=True, sharey="row")
    for (upper, lower), ((model, kind), own) in zip(panels.T, columns.items()):
        for row in own:
            at = [(span["start"] + span["stop"]) / 2 for span in row["spans"]]
            upper.plot(at, [span["kl"] for span in row["spans"]], label=row["method"], marker=".")
            lower.plot(at, [span["same"] for span in row["spans"]], marker=".")
        upper.set(title=f"{kind}, {model}", yscale="log")
        lower.set(xlabel="position in the answer (tokens)", ylim=(0, 1.02))
        for axes in (upper, lower):
            axes.grid(alpha=0.3)
    panels[0, 0].set_ylabel("KL to the full cache (nats a token)")
    panels[1, 0].set_ylabel("share of equal tokens")
    handles = panels[0, 0].get_legend_handles_labels()
    drawn.legend(*handles, loc="outside lower center", ncols=2, fontsize=8)
    return drawn


def main() -> None:
    """Measure each model, add its rows, and draw the picture."""
    numpy_attention.install()
    parser = shared_options(__doc__, "long-answers")
    parser.set_defaults(models=["real-models/smollm2-135m-instruct"])
    parser.add_argument("--folder", type=Path, default=ROOT / "real-models", help="essays and code")
    parser.add_argument("--length", type=int, default=1400, help="tokens of a text")
    parser.add_argument("--texts", type=int, default=4, help="texts of each kind")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of an answer, at most")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    args = parser.parse_args()
    methods = [Method(setting_named(text)) for text in args.methods]
    result, rows = Result(args.out, length=args.length, texts=args.texts), []
    for name in args.models:
        model, tokenizer = load_model(name)
        for kind, (folder, request) in REQUESTS.items():
            frame, texts = frame_of(tokenizer, request), Texts([str(args.folder / folder)])
            pieces = texts.pieces(tokenizer, args.length, 0, args.texts)
            prompts = [[*frame.before, *piece.tokens, *frame.after] for piece in pieces]
            for row in measure(model, tokenizer, prompts, methods, args.tokens):
                rows.append({"model": Path(name).name, "kind": kind} | row)
                result.add(rows[-1])
    put_figure(args.out.with_suffix(".png"), figure(rows))


if __name__ == "__main__":
    main()
