"""Facts of one document, asked for one a turn: what every memory, number of bits and budget still finds.

    python scripts/measure_facts.py                      # writes docs/facts.json; then: make docs

Answers are decoded from the small cache from their first token on (`lookahead=0`): else short ones are the full
cache's own.
"""

import random
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import mlx.core as mx
from mlx.utils import tree_reduce
from results_page import Result, clock, shared_options

from mlx_snapkv import Conversation
from mlx_snapkv.caches.layers import file_bytes, kv_bytes
from mlx_snapkv.cli.loading import load_model
from mlx_snapkv.demo.questions import is_right, make_haystack
from mlx_snapkv.sparse.stores import STORES

SEED = 8_000_000
SHARES = (8, 16, 32, 64)  # one entry in so many is kept, or resident
SHARE = 16  # where the shares are not compared
LEAST = 128  # entries gathered for an answer
BLOCK = 256
FEW_RECENT = "n_window=10%"  # facts are looked up anywhere in a document


@dataclass(frozen=True)
class Way:
    """How a conversation remembers: a row named so of a table, with one entry in so many kept, or resident."""

    table: str
    name: str
    policy: str | None = None
    store: str | None = None
    share: int = SHARE
    sparse: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


def snapkv(entries: int) -> str:
    return f"snapkv:budget={entries},lookahead=0"


def sparse(entries: int) -> str:
    return f"budget={entries}"


def ways(tokens: int) -> Iterator[Way]:
    kept = tokens // SHARE
    keydiff = f"keydiff:budget={kept},{FEW_RECENT},block={BLOCK}"
    yield Way("memories", "full cache")
    for store in STORES:
        yield Way("memories", f"sparse, {store}", store=store, sparse=sparse(kept))
    yield Way("memories", "SnapKV", snapkv(kept))
    yield Way("memories", "KeyDiff", keydiff)
    for name, policy in (("full cache", None), ("SnapKV", snapkv(kept)), ("KeyDiff", keydiff)):
        for bits in (8, 4):
            options = {"kv_bits": bits, "kv_group_size": 64, "quantized_kv_start": 0}
            yield Way("bits", f"{name}, {bits} bits", policy, options=options)
    for share in SHARES:
        n = tokens // share
        alone = f"keydiff:budget={n},{FEW_RECENT},block={BLOCK}"
        both = f"{alone} then {snapkv(max(n, LEAST))}"
        dense = f"{sparse(max(n, LEAST))},read=dense"
        few = f"{sparse(max(n, LEAST))},read_top_k={max(n, LEAST)}"
        yield Way("resident", "sparse, read densely", share=share, store="memory", sparse=dense)
        yield Way("resident", "sparse", share=share, store="file", sparse=few)
        yield Way("resident", "KeyDiff", alone, share=share)
        yield Way("resident", "KeyDiff, then SnapKV", both, share=share)


def measure(model, tokenizer, way: Way, tokens: int, documents: int, facts: int) -> dict[str, Any]:
    """Right answers, bytes and seconds of one way."""
    weights = tree_reduce(lambda n, array: n + array.nbytes, model.parameters(), 0)
    right, peak, first, later = 0, 0, [], []
    for n in range(documents):
        document, asked = make_haystack(tokenizer, random.Random(SEED + n), facts, tokens)
        given = {"policy": way.policy, "sparse": way.sparse, "store": way.store, "max_tokens": 24}
        conversation = Conversation(model, tokenizer, **given, **way.options)
        conversation.attach(document)
        for i, fact in enumerate(asked):
            mx.reset_peak_memory()
            started = clock()
            answer = "".join(response.text for response in conversation.send(fact.question))
            (later if i else first).append(clock() - started)
            right += is_right(fact, answer)
            peak = max(peak, mx.get_peak_memory() if i else 0)
    held, report = kv_bytes(conversation.prompt_cache), conversation.report
    return {
        "right": right,
        "asked": documents * facts,
        "held_bytes": held,
        "file_bytes": file_bytes(conversation.prompt_cache),
        "decoding_bytes": report.kv_bytes_read if report and report.compressed else held,
        "peak_bytes": peak - weights,
        "first_seconds": statistics.median(first),
        "later_seconds": statistics.median(later),
    }


def main() -> None:
    parser = shared_options(__doc__, "facts")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--documents", type=int, default=2)
    parser.add_argument("--facts", type=int, default=10, help="of a document")
    args = parser.parse_args()
    result = Result(args.out, tokens=args.tokens, documents=args.documents, facts=args.facts)
    for name in args.models:
        model, tokenizer = load_model(name)
        for way in ways(args.tokens):
            found = measure(model, tokenizer, way, args.tokens, args.documents, args.facts)
            result.add({"model": name, **asdict(way), **found})


if __name__ == "__main__":
    main()
