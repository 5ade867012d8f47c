"""Measure how far predictions move if all entries are quantised. Writes docs/bits.json.

    make real-models
    python scripts/make_real_models.py --model qwen2.5-coder-1.5b-instruct
    python scripts/measure_bits.py; make docs

A text is read with the full cache. Its entries are quantised as with --kv-bits and --quantized-kv-start 0, and the full
cache's predictions after the tokens that follow are compared with those from the quantised entries.
"""

import copy
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy_attention
from mlx_lm.models.cache import make_prompt_cache
from results_page import ROOT, Result, Row, result_options

from mlx_snapkv.cli.loading import load_model
from mlx_snapkv.engine.prefill import read
from mlx_snapkv.measure.divergence import divergence, log_softmax, logits_after
from mlx_snapkv.measure.tables import grouped
from mlx_snapkv.measure.texts import Texts

FOLLOWING = 64  # tokens after a text, after each of which predictions are compared
GROUP_SIZE = 64  # mlx-lm's default
KINDS = ("code", "essays")  # folders of texts


def compare(
    model: Any, tokens: list[int], following: list[int], bits_to_compare: list[int]
) -> Iterator[Row]:
    """Yield the mean KL (nats per token) and the share of equal tokens after a text, for each number of bits."""
    cache = make_prompt_cache(model)
    read(model, mx.array(tokens), cache, {})
    full_logprobs = log_softmax(logits_after(model, copy.deepcopy(cache), following))
    for bits in bits_to_compare:
        quantised_cache = [layer.to_quantized(GROUP_SIZE, bits) for layer in cache]
        logprobs = log_softmax(logits_after(model, quantised_cache, following))
        is_same = mx.argmax(full_logprobs, axis=-1) == mx.argmax(logprobs, axis=-1)
        kl = divergence(full_logprobs, logprobs)
        yield {"bits": bits, "kl": float(kl.mean()), "same": float(is_same.mean())}


def main() -> None:
    """Measure each model and kind of text, and add a row for each number of bits."""
    numpy_attention.install()
    parser = result_options(__doc__, "bits")
    parser.add_argument(
        "--models",
        nargs="+",
        default=["real-models/qwen2.5-coder-1.5b-instruct", "real-models/smollm2-135m-instruct"],
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "real-models", help="essays and code")
    parser.add_argument("--bits", type=int, nargs="+", default=[8, 6, 4])
    parser.add_argument("--length", type=int, default=1400, help="tokens of a text")
    parser.add_argument("--documents", type=int, default=4, help="texts of each kind")
    args = parser.parse_args()
    result = Result(args.out, length=args.length)
    for name in args.models:
        model, tokenizer = load_model(name)
        for kind in KINDS:
            texts = Texts([str(args.folder / kind)])
            rows: list[Row] = []
            for piece in texts.pieces(tokenizer, args.length, FOLLOWING, args.documents):
                rows += compare(model, piece.tokens, piece.following, args.bits)
            for (bits,), bits_rows in grouped(rows, "bits").items():
                case = {"model": Path(name).name, "text": kind, "bits": bits, "n": len(bits_rows)}
                means = {
                    key: statistics.mean(row[key] for row in bits_rows) for key in ("kl", "same")
                }
                result.add(case | means)


if __name__ == "__main__":
    main()
