"""Measure which facts in a document a conversation finds, one per turn, by store and budget.

    python scripts/measure_facts.py                      # writes docs/facts.json; then: make docs

All answer tokens are decoded from the compressed cache (`lookahead=0`). With a lookahead, the full cache would
give the short answers.
"""

import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_reduce
from results_page import Result, result_options

from mlx_snapkv import Conversation
from mlx_snapkv.caches.layers import file_bytes, kv_bytes
from mlx_snapkv.cli.loading import load_model
from mlx_snapkv.demo.questions import is_right, make_haystack
from mlx_snapkv.sparse.stores import STORES

SEED = 8_000_000
SHARES = (8, 16, 32, 64)  # 1/SHARE of the entries are kept, or read
SHARE = 16  # share in all other tables
MIN_ENTRIES = 128  # minimum number of entries that an answer token reads
BLOCK = 256  # tokens between two evictions
FEW_RECENT = "n_window=10%"  # facts are looked up anywhere in a document


@dataclass(frozen=True)
class Way:
    """A row of a table: a conversation's setting, and its share of the entries.

    Attributes:
        table: the table's name.
        name: the row's name.
        share: 1/share of the entries are kept, or read.
    """

    table: str
    name: str
    policy: str | None = None
    share: int = SHARE
    sparse: str | None = None


def snapkv(entries: int) -> str:
    """Return a policy that keeps `entries`."""
    return f"snapkv:budget={entries},lookahead=0"


def keydiff(entries: int) -> str:
    """Return a policy that keeps `entries`, and evicts while it reads."""
    return f"keydiff:budget={entries},{FEW_RECENT},block={BLOCK}"


def sparse(entries: int, store: str = "memory") -> str:
    """Return sparse attention options with a budget of `entries`, and with all entries in a store."""
    return f"budget={entries},when=always,store={store}"


def ways(tokens: int) -> Iterator[Way]:
    """Yield the rows of all tables, for documents of `tokens` tokens."""
    budget = tokens // SHARE
    yield Way("memories", "full cache")
    for store in STORES:
        yield Way("memories", f"sparse, {store}", sparse=sparse(budget, store))
    yield Way("memories", "SnapKV", snapkv(budget))
    yield Way("memories", "KeyDiff", keydiff(budget))
    for share in SHARES:
        budget = tokens // share
        decode_budget = max(budget, MIN_ENTRIES)
        read_sparsely = f"{sparse(decode_budget, 'file')},read_top_k={decode_budget}"
        two_policies = f"{keydiff(budget)} then {snapkv(decode_budget)}"
        yield Way("resident", "sparse, read densely", share=share, sparse=sparse(decode_budget))
        yield Way("resident", "sparse", share=share, sparse=read_sparsely)
        yield Way("resident", "KeyDiff", keydiff(budget), share=share)
        yield Way("resident", "KeyDiff, then SnapKV", two_policies, share=share)


def clock() -> float:
    """Return the time in seconds: CPU time on a CPU, so that other processes don't count, otherwise real time."""
    return time.process_time() if mx.default_device().type == mx.cpu else time.perf_counter()


def measure(model, tokenizer, way: Way, tokens: int, documents: int, facts: int) -> dict[str, Any]:
    """Ask for the facts in several documents. Return the number of right answers, bytes and seconds."""
    weight_bytes = tree_reduce(lambda n_bytes, array: n_bytes + array.nbytes, model.parameters(), 0)
    n_right = peak_bytes = 0
    first_seconds: list[float] = []
    later_seconds: list[float] = []
    for number in range(documents):
        rng = random.Random(SEED + number)
        document, hidden_facts = make_haystack(tokenizer, rng, facts, tokens)
        setting = {"policy": way.policy, "sparse": way.sparse}
        conversation = Conversation(model, tokenizer, max_tokens=24, **setting)
        conversation.attach(document)
        for i, fact in enumerate(hidden_facts):
            mx.reset_peak_memory()
            started = clock()
            answer = "".join(response.text for response in conversation.send(fact.question))
            seconds = clock() - started
            n_right += is_right(fact, answer)
            is_first_turn = i == 0  # reads the document
            if is_first_turn:
                first_seconds.append(seconds)
            else:
                later_seconds.append(seconds)
                peak_bytes = max(peak_bytes, mx.get_peak_memory())
    cache_bytes = kv_bytes(conversation.prompt_cache)
    report = conversation.report
    is_compressed = report is not None and report.compressed
    return {
        "right": n_right,
        "asked": documents * facts,
        "held_bytes": cache_bytes,
        "file_bytes": file_bytes(conversation.prompt_cache),
        "decoding_bytes": report.kv_bytes_read if is_compressed else cache_bytes,
        "peak_bytes": peak_bytes - weight_bytes,
        "first_seconds": statistics.median(first_seconds),
        "later_seconds": statistics.median(later_seconds),
    }


def main() -> None:
    """Measure each model with each kind of cache and add the rows."""
    parser = result_options(__doc__, "facts")
    parser.add_argument("--models", nargs="+", default=["demo", "demo-qwen3-next"])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--documents", type=int, default=2)
    parser.add_argument("--facts", type=int, default=10, help="facts in a document")
    args = parser.parse_args()
    result = Result(args.out, tokens=args.tokens, documents=args.documents, facts=args.facts)
    for name in args.models:
        model, tokenizer = load_model(name)
        for way in ways(args.tokens):
            figures = measure(model, tokenizer, way, args.tokens, args.documents, args.facts)
            result.add({"model": name, **asdict(way), **figures})


if __name__ == "__main__":
    main()
