"""Measure how far predictions move if all entries are quantised. Writes docs/bits.json.

    make real-models
    python scripts/make_real_models.py --model qwen2.5-coder-1.5b-instruct
    python scripts/measure_bits.py; make docs

A text is read with the full cache, its entries are quantised as with --kv-bits, and the full cache's predictions of the
following tokens are compared with those from the quantised entries.
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
from mlx_snapkv.measure.divergence import divergence, log_softmax
from mlx_snapkv.measure.tables import grouped
from mlx_snapkv.measure.texts import Texts

FOLLOWING = 64  # tokens whose predictions are compared
GROUP_SIZE = 64  # mlx-lm's default
KINDS = ("code", "essays")  # of texts


def predictions(model: Any, tokens: list[int], cache: list) -> mx.array:
    """Return log-probabilities `(n, vocab_size)` for what follows each of `n` tokens. The cache grows."""
    return log_softmax(model(mx.array(tokens)[None], cache=cache)[0])


def compare(
    model: Any, tokens: list[int], following: list[int], all_bits: list[int]
) -> Iterator[Row]:
    """Yield the KL and the share of equal tokens after a text, for each number of bits."""
    cache = make_prompt_cache(model)
    read(model, mx.array(tokens), cache, {})
    full_logprobs = predictions(model, following, copy.deepcopy(cache))
    for bits in all_bits:
        quantised = [layer.to_quantized(GROUP_SIZE, bits) for layer in cache]
        logprobs = predictions(model, following, quantised)
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
