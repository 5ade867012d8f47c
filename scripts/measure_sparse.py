"""Measure the loss from sparse prefill, by the entries that a chunk chooses. Writes docs/reading.json.

    make real-models
    python scripts/make_ruler.py MODEL real-models/ruler/NAME --length 4096
    python scripts/measure_sparse.py --models MODEL; make docs

A text is read with the full cache, and then in chunks that choose entries, once for each number of entries. After each
reading, the following tokens are decoded from all entries, so only the prefill differs. Answers to needle questions are
scored in the same way.
"""

import itertools
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy_attention
from evaluation.columns import read_columns
from mlx_lm.models.cache import make_prompt_cache
from results_page import ROOT, Result, result_options

from mlx_snapkv import Sparse, prefill
from mlx_snapkv.cli.loading import load_model
from mlx_snapkv.engine.prefill import read
from mlx_snapkv.measure.divergence import divergence, log_softmax, logits_after
from mlx_snapkv.measure.tables import grouped
from mlx_snapkv.measure.texts import Texts
from mlx_snapkv.sparse.options import CHUNK_SIZE

JUDGED = 64  # tokens scored after a text

# Kind, prompt, and the tokens after it that are scored.
Case = tuple[str, list[int], list[int]]


def texts(tokenizer, folder: Path, length: int, documents: int) -> Iterator[Case]:
    """Yield pieces of a folder's texts."""
    for piece in Texts([str(folder)]).pieces(tokenizer, length, JUDGED, documents):
        yield "text", piece.tokens, piece.following


def prompt_of(tokenizer, text: str, answer_prefix: str) -> list[int]:
    """Encode a message and the answer's first words, with the chat template if there is one."""
    if not tokenizer.has_chat_template:
        return tokenizer.encode(text + answer_prefix)
    message = {"role": "user", "content": text}
    prompt = tokenizer.apply_chat_template([message], add_generation_prompt=True)
    return prompt + tokenizer.encode(answer_prefix, add_special_tokens=False)


def needles(tokenizer, ruler: Path, length: int, documents: int) -> Iterator[Case]:
    """Yield questions from RULER's niah_single_2, with their answers."""
    file = ruler / str(length) / "niah_single_2.jsonl"
    rows_by_document, _ = read_columns(str(file), max_documents=documents)
    for (row,) in rows_by_document:
        prompt = prompt_of(tokenizer, row.context + row.question, row.answer_prefix)
        (value,) = row.answer
        yield "needle", prompt, tokenizer.encode(f" {value}", add_special_tokens=False)


def predictions(model, case: Case, sparse: Sparse | None) -> mx.array:
    """Return log-probabilities `(n, vocab_size)` for the tokens after a prompt, with a sparse or full prefill."""
    _, prompt, following = case
    if sparse is None:
        cache = make_prompt_cache(model)
        read(model, mx.array(prompt[:-1]), cache, {"prefill_step_size": CHUNK_SIZE})
    else:
        cache, _ = prefill(model, prompt[:-1], sparse=sparse)
    return log_softmax(logits_after(model, cache, [prompt[-1], *following[:-1]]))


def compared(model, case: Case, top_ks: list[int]) -> Iterator[dict[str, Any]]:
    """Yield the KL and the share of right predictions for each number of entries that a chunk chooses."""
    kind, _, following = case
    full_logprobs = predictions(model, case, None)
    for top_k in top_ks:
        logprobs = predictions(model, case, Sparse(read_top_k=top_k))
        is_right = mx.argmax(logprobs, axis=-1) == mx.array(following)
        yield {
            "kind": kind,
            "top_k": top_k,
            "kl": float(divergence(full_logprobs, logprobs).mean()),
            "right": float(is_right.astype(mx.float32).mean()),
        }


def main() -> None:
    """Measure each model and length, and add a row for each number of entries that a chunk chooses."""
    numpy_attention.install()
    parser = result_options(__doc__, "reading")
    parser.add_argument("--models", nargs="+", default=["real-models/smollm2-135m-instruct"])
    parser.add_argument("--text", type=Path, default=ROOT / "real-models" / "essays")
    parser.add_argument("--ruler", type=Path, default=ROOT / "real-models" / "ruler")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 6000])
    parser.add_argument("--top-k", type=int, nargs="+", default=[256, 512, 1024, 2048])
    parser.add_argument("--documents", type=int, default=2, help="texts and needles")
    args = parser.parse_args()
    result = Result(args.out, documents=args.documents)
    for name in args.models:
        model, tokenizer = load_model(name)
        for length in args.lengths:
            top_ks = [top_k for top_k in args.top_k if top_k < length]
            cases = texts(tokenizer, args.text, length, args.documents)
            ruler = args.ruler / Path(name).name
            if (ruler / str(length)).is_dir():
                cases = itertools.chain(cases, needles(tokenizer, ruler, length, args.documents))
            rows = [row for case in cases for row in compared(model, case, top_ks)]
            for (kind, top_k), case_rows in grouped(rows, "kind", "top_k").items():
                row = {"model": Path(name).name, "length": length, "kind": kind, "top_k": top_k}
                row["n"] = len(case_rows)
                for figure in ("kl", "right"):
                    row[figure] = statistics.mean(case_row[figure] for case_row in case_rows)
                result.add(row)


if __name__ == "__main__":
    main()
