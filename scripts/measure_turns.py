"""Facts of one document asked for one by one in a conversation, with every memory, on both embedded models.

python scripts/measure_turns.py                      # writes docs/turns.json and docs/turns.md
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from typing import Any

import mlx.core as mx
from mlx.utils import tree_reduce
from results_page import about, shared_options, write, written_by

from mlx_snapkv import Conversation
from mlx_snapkv.caches.layers import file_bytes, kv_bytes
from mlx_snapkv.caches.memories import MEMORIES
from mlx_snapkv.cli.loading import load_model
from mlx_snapkv.demo.questions import is_right, make_haystack
from mlx_snapkv.engine.report import format_bytes

SEED = 8_000_000
SMALL = "snapkv:budget={},n_sink=4,n_window=32,min_ctx=0"
KEYS = "keydiff:budget={}"
WAYS = [
    ("full cache", None, "drop"),
    *((f"SnapKV, {memory}", SMALL, memory) for memory in MEMORIES if memory != "drop"),
    ("SnapKV, drop", SMALL, "drop"),
    ("KeyDiff, recall", KEYS, "recall"),
    ("KeyDiff, drop", KEYS, "drop"),
]


def measure(name: str, tokens: int, share: int, documents: int, turns: int) -> list[dict[str, Any]]:
    """A JSON object a way."""
    model, tokenizer = load_model(name)
    weights = tree_reduce(lambda n, array: n + array.nbytes, model.parameters(), 0)
    rows = []
    for way, policy, memory in WAYS:
        right, first, later, peak = 0, [], [], 0
        for n in range(documents):
            document, facts = make_haystack(tokenizer, random.Random(SEED + n), turns, tokens)
            spec = policy.format(tokens // share) if policy else None
            conversation = Conversation(model, tokenizer, policy=spec, memory=memory, max_tokens=24)
            conversation.attach(document)
            for i, fact in enumerate(facts):
                mx.reset_peak_memory()
                started = time.perf_counter()
                answer = "".join(response.text for response in conversation.send(fact.question))
                (later if i else first).append(time.perf_counter() - started)
                right += is_right(fact, answer)
                peak = max(peak, mx.get_peak_memory() if i else 0)
        held = kv_bytes(conversation.prompt_cache)
        report = conversation.report
        assert report is not None
        rows.append(
            {
                "model": name,
                "way": way,
                "right": right,
                "asked": documents * turns,
                "held_bytes": held,
                "file_bytes": file_bytes(conversation.prompt_cache),
                "peak_bytes": peak - weights,
                "decoding_bytes": report.kv_bytes_after if report.compressed else held,
                "first_seconds": statistics.median(first),
                "later_seconds": statistics.median(later),
            }
        )
        print(rows[-1], flush=True)
    return rows


def page(result: dict[str, Any]) -> str:
    """docs/turns.md, from its result."""
    lines = [
        "# Follow-up turns",
        "",
        written_by(result),
        "",
        f"A document of about {result['tokens']:,} tokens hides {result['turns']} facts, asked for one by one in one "
        f"conversation; {result['documents']} documents. Budgets are 1/{result['share']} of the document's entries. "
        '"Held" is the KV memory between turns, "in files" what is offloaded there, "decoding" what an answer is '
        'decoded from, "peak" the most memory that a later turn needed besides the weights, the entries held among it; '
        "seconds are medians of whole turns, the first of which reads the document.",
    ]
    for name in dict.fromkeys(row["model"] for row in result["rows"]):
        lines += ["", f"## `{name}`", ""]
        lines += [
            "| cache | right | held | in files | decoding | peak | first turn | later turns |"
        ]
        lines += ["| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"]
        for r in (r for r in result["rows"] if r["model"] == name):
            lines.append(
                f"| {r['way']} | {r['right']}/{r['asked']} | {format_bytes(r['held_bytes'])} | "
                f"{format_bytes(r['file_bytes'])} | {format_bytes(r['decoding_bytes'])} | "
                f"{format_bytes(r['peak_bytes'])} | {r['first_seconds']:.2f} s | {r['later_seconds']:.2f} s |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = shared_options(__doc__, "turns")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--share", type=int, default=16, help="one entry in so many is kept")
    parser.add_argument("--documents", type=int, default=3)
    parser.add_argument("--turns", type=int, default=10)
    args = parser.parse_args()
    here = about("measure_turns.py", *sys.argv[1:])
    rows: list[dict[str, Any]] = []
    for name in args.models:
        rows += measure(name, args.tokens, args.share, args.documents, args.turns)
    result = {
        **here,
        "tokens": args.tokens,
        "share": args.share,
        "documents": args.documents,
        "turns": args.turns,
        "rows": rows,
    }
    write(args.out, result, page(result))
    print(page(result))


if __name__ == "__main__":
    main()
