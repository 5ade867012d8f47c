"""How far each mode's answer is from the full cache's, by the place in the answer; writes docs/modes.json and .png.

    make real-models
    python scripts/measure_modes.py --models real-models/smollm2-135m-instruct; make docs

Each mode reads a text and gets the tokens that follow in it, one by one; its predictions are compared with those of
the full cache. A policy chooses once what stays, sparse attention chooses for every token what it reads.
"""

import itertools
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy_attention
from results_page import ROOT, Result, shared_options

from mlx_snapkv import generate_step
from mlx_snapkv.cli.loading import load_model
from mlx_snapkv.evals.divergence import divergence, log_softmax
from mlx_snapkv.evals.texts import Texts
from mlx_snapkv.reporting.files import put_figure

MODES = {
    "SnapKV, 1/8": {"policy": "snapkv:budget=12.5%"},
    "StreamingLLM, 1/8": {"policy": "streaming_llm:budget=12.5%,schedule=once"},
    "sparse, 1/16": {"sparse": "budget=6.25%"},
}
EDGES = (
    2,
    8,
    32,
    64,
    128,
    256,
    512,
)  # of the places in an answer; its first two tokens are the full cache's


def predictions(model, prompt: list[int], following: list[int], **options: Any) -> mx.array:
    """Log-probabilities `(n, vocab_size)` of the tokens that follow, each given those before it."""
    tokens = itertools.chain(following, itertools.repeat(0))
    found = []
    options |= {"sampler": lambda _: mx.array([next(tokens)]), "max_tokens": len(following)}
    for _, logprobs in generate_step(mx.array(prompt), model, **options):
        found.append(logprobs.astype(mx.float32))
        mx.eval(found[-1])
    return log_softmax(mx.stack(found))


def of_text(model, prompt: list[int], following: list[int]) -> Iterator[dict[str, Any]]:
    """KL by mode and span of places."""
    full = predictions(model, prompt, following)
    for mode, options in MODES.items():
        each = divergence(full, predictions(model, prompt, following, **options))
        for start, stop in itertools.pairwise(EDGES):
            yield {"mode": mode, "start": start, "stop": stop, "kl": float(each[start:stop].mean())}


def figure(rows: list[dict[str, Any]]) -> Any:
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(6.4, 4), layout="constrained")
    axes = drawn.subplots()
    for mode, marker in zip(MODES, "osd"):
        mine = [row for row in rows if row["mode"] == mode]
        axes.plot([r["stop"] for r in mine], [r["kl"] for r in mine], label=mode, marker=marker)
    axes.set(xlabel="token of the answer", ylabel="KL to the full cache (nats a token)")
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(EDGES[1:], [str(edge) for edge in EDGES[1:]])
    axes.grid(alpha=0.3)
    axes.legend()
    return drawn


def main() -> None:
    numpy_attention.install()
    parser = shared_options(__doc__, "modes")
    parser.set_defaults(models=["real-models/smollm2-135m-instruct"])
    parser.add_argument("--text", type=Path, default=ROOT / "real-models" / "essays")
    parser.add_argument("--length", type=int, default=1400, help="tokens of a prompt")
    parser.add_argument("--documents", type=int, default=4)
    args = parser.parse_args()
    result = Result(args.out, length=args.length, documents=args.documents)
    for name in args.models:
        model, tokenizer = load_model(name)
        rows: list[dict[str, Any]] = []
        pieces = Texts([str(args.text)]).pieces(tokenizer, args.length, EDGES[-1], args.documents)
        for piece in pieces:
            rows += of_text(model, piece.tokens, piece.following)
        means = []
        for mode, (start, stop) in itertools.product(MODES, itertools.pairwise(EDGES)):
            own = [r["kl"] for r in rows if r["mode"] == mode and r["start"] == start]
            means.append({"mode": mode, "start": start, "stop": stop, "kl": statistics.mean(own)})
        for row in means:
            result.add({"model": Path(name).name} | row)
        put_figure(args.out.with_suffix(".png"), figure(means))


if __name__ == "__main__":
    main()
