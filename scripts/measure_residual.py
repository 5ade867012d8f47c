r"""Measure how far answers are from the full cache's, for several ways to average the unread entries.

    make real-models
    python scripts/measure_residual.py
    python scripts/measure_residual.py --models real-models/qwen2.5-coder-1.5b-instruct --text real-models/code \
        --documents 1 --lengths 1400 6000 --out docs/residual-code; make docs

Texts are joined, because few are long. A piece is read with the full cache. Then each method is fed the tokens that
follow, and reads the same number of bytes per token: entries chosen by an index of the keys, and means of the
unread entries. The more means there are, the fewer entries are chosen.
"""

import copy
import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy_attention
from evaluation.answering import forcing
from mlx_lm.models.cache import make_prompt_cache
from results_page import ROOT, Result, Row, result_options

from mlx_snapkv import generate_step
from mlx_snapkv.cli.loading import load_model
from mlx_snapkv.engine.prefill import read
from mlx_snapkv.measure.divergence import divergence, log_softmax
from mlx_snapkv.measure.tables import grouped
from mlx_snapkv.models.trained_length import trained_length
from mlx_snapkv.sparse import clusters, index
from mlx_snapkv.sparse.options import CHUNK_SIZE

FOLLOWING = 64  # tokens whose predictions are compared
# A piece's last tokens. Each method reads them itself, because the means are weighted for their queries.
LATEST = 64


def neighbours(keys: mx.array, n_groups: int) -> tuple[mx.array, mx.array]:
    """Group neighbouring keys. This function replaces `k_means`."""
    B, n_kv_heads, n_keys, _ = keys.shape
    group_ids = (mx.arange(n_keys) // clusters.CLUSTER_SIZE).astype(mx.uint16)
    group_ids = mx.contiguous(mx.broadcast_to(group_ids, (B, n_kv_heads, n_keys)))
    return group_ids, clusters.mean_by_cluster(keys, group_ids, n_groups)


# Name -> function that groups entries, and entries per group; 0 for no means.
WAYS: dict[str, tuple[Callable, int]] = {
    "nothing": (clusters.k_means, 0),
    "pages of 256": (neighbours, 256),
    **{f"clusters of {n}": (clusters.k_means, n) for n in (256, 128, 64, 32)},
}


def grouping(group: Callable, size: int) -> AbstractContextManager:
    """Patch the residual to use means of `size` entries grouped by `group`, or do nothing if `size` is 0."""
    if size == 0:
        return nullcontext()
    per_block = clusters.BLOCK_SIZE // size
    return mock.patch.multiple(
        clusters, k_means=group, CLUSTER_SIZE=size, CLUSTERS_PER_BLOCK=per_block
    )


def predictions(model, prompt: list[int], following: list[int], **options: Any) -> mx.array:
    """Return log-probabilities `(n, vocab_size)` for the tokens that follow a prompt."""
    options |= {"sampler": forcing(following), "max_tokens": len(following)}
    float32_logprobs = []
    for _, logprobs in generate_step(mx.array(prompt), model, **options):
        float32_logprobs.append(logprobs.astype(mx.float32))
        mx.eval(float32_logprobs[-1])
    return log_softmax(mx.stack(float32_logprobs))


def compare(model, tokens: list[int], following: list[int], share: float) -> Iterator[Row]:
    """Yield the KL on the tokens after a piece, for each method."""
    cache = make_prompt_cache(model)
    read(model, mx.array(tokens[:-LATEST]), cache, {"prefill_step_size": CHUNK_SIZE})
    latest = tokens[-LATEST:]
    full_logprobs = predictions(model, latest, following, prompt_cache=copy.deepcopy(cache))
    for way, (group, size) in WAYS.items():
        share_of_means = 1 / size if size else 0
        share_of_entries = share - share_of_means
        residual = "means" if size else "none"
        sparse = f"budget={100 * share_of_entries}%,when=always,residual={residual}"
        with grouping(group, size):
            options = {"prompt_cache": copy.deepcopy(cache), "sparse": sparse}
            logprobs = predictions(model, latest, following, **options)
        yield {"way": way, "kl": float(divergence(full_logprobs, logprobs)[1:].mean())}


def pieces(
    tokenizer, folder: Path, length: int, documents: int
) -> list[tuple[list[int], list[int]]]:
    """Return disjoint pieces of a folder's joined texts, each with the tokens after it."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.*"))]
    tokens = tokenizer.encode("\n\n".join(texts), add_special_tokens=False)
    n_needed = length + FOLLOWING
    starts = range(0, len(tokens) - n_needed + 1, n_needed)
    pieces_and_following = []
    for start in starts[:documents]:
        stop = start + length
        pieces_and_following.append((tokens[start:stop], tokens[stop : start + n_needed]))
    return pieces_and_following


def main() -> None:
    """Measure each model and length, and add a row for each kind of means."""
    numpy_attention.install()
    index.EXACT_ENTRIES = 0  # use an index for texts of any length
    parser = result_options(__doc__, "residual")
    parser.add_argument(
        "--models",
        nargs="+",
        default=["real-models/smollm2-135m-instruct", "real-models/gemma-3-270m"],
    )
    parser.add_argument("--text", type=Path, default=ROOT / "real-models" / "essays")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1400, 6000, 16000])
    parser.add_argument("--share", type=int, default=16, help="1/SHARE of the bytes are read")
    parser.add_argument("--documents", type=int, default=2)
    args = parser.parse_args()
    result = Result(args.out, share=args.share)
    for name in args.models:
        model, tokenizer = load_model(name)
        for length in args.lengths:
            longest = trained_length(model)
            if longest is not None and length > longest:
                continue
            rows: list[Row] = []
            for tokens, following in pieces(tokenizer, args.text, length, args.documents):
                rows += compare(model, tokens, following, 1 / args.share)
            for (way,), way_rows in grouped(rows, "way").items():
                case = {"model": Path(name).name, "text": args.text.name, "length": length}
                kl = statistics.mean(row["kl"] for row in way_rows)
                result.add(case | {"way": way, "n": len(way_rows), "kl": kl})


if __name__ == "__main__":
    main()
