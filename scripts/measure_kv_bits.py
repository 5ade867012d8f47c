"""Facts found with entries of 8 and of 4 bits, with the full cache and with policies, on both embedded models.

    python scripts/measure_kv_bits.py                    # writes docs/kv-bits.json and docs/kv-bits.md

Each cell's documents are those of `mlx-snapkv eval needle --needles 4`, with fixed seeds.
"""

from __future__ import annotations

import sys
from typing import Any

from results_page import about, mlx_versions, shared_options, write, written_by

from mlx_snapkv.cli.loading import load_model
from mlx_snapkv.engine.report import format_bytes
from mlx_snapkv.evals.answering import FULL, KNOWN, Method
from mlx_snapkv.evals.asking import run
from mlx_snapkv.evals.haystack import PAGE
from mlx_snapkv.evals.needle import Needle
from mlx_snapkv.evals.results import Results
from mlx_snapkv.evals.score_tables import summarise
from mlx_snapkv.policies import resolve_policy

SEED, NEEDLES, DEPTHS = 10_000_000, 4, 5
GROUP_SIZE = 64
BITS = (None, 8, 4)
SNAPKV = "snapkv:budget=6.25%,n_sink=4,n_window=32,obs_window=32,lookahead=0"
KEYDIFF = "keydiff:budget=12.5%,block=256"
POLICIES = [SNAPKV, KEYDIFF, f"{KEYDIFF} then {SNAPKV}"]


def measure(name: str, length: int, questions: int) -> list[dict[str, Any]]:
    """A JSON object a policy and number of bits, the full cache first."""
    model, tokenizer = load_model(name)
    dataset = Needle(tokenizer, [length], DEPTHS, questions, SEED, needles=NEEDLES)
    policies = {FULL: None} | {text: resolve_policy(policy=text) for text in POLICIES}
    rows = []
    for bits in BITS:
        options = {"kv_bits": bits, "kv_group_size": GROUP_SIZE, "quantized_kv_start": 0}
        methods = [Method(policy, chosen, options) for policy, chosen in policies.items()]
        records = run(model, dataset, methods, [KNOWN], Results({}))
        longest = max(record["tokens"] for record in records)
        for found in summarise(records, PAGE):
            row = {"model": name, "bits": bits, "policy": found["method"], "length": length}
            row |= {"right": round(found["score"] * found["asked"]), "asked": found["asked"]}
            row |= {"entries": found["entries"] or longest, "kv_bytes": found["kv_bytes"]}
            rows.append(row)
            print(rows[-1], flush=True)
    return sorted(rows, key=lambda row: [*policies].index(row["policy"]))


def page(result: dict[str, Any]) -> str:
    """docs/kv-bits.md, from its result."""
    lines = [
        "# Quantised entries",
        "",
        written_by(result),
        "",
        f"Prompts of {result['length']:,} tokens with {result['needles']} facts, one of them asked for; "
        f"{result['depths']} depths, {result['questions']} questions at each. `kv_bits` in groups of "
        f"{result['group_size']}; the full cache is mlx-lm's own, quantised from the first chunk. Weights and plain "
        "entries are float32, as a CPU computes quickest: of a float16 cache the same bits are about twice the share. "
        "Entries are those kept per KV head; KV memory is read from the arrays after the answer, with the room "
        "for the next block under a block policy.",
    ]
    for name in dict.fromkeys(row["model"] for row in result["rows"]):
        mine = [r for r in result["rows"] if r["model"] == name]
        whole = mine[0]["kv_bytes"]
        lines += ["", f"## `{name}`", ""]
        lines += ["| policy | bits | right | entries | KV memory | share of the full cache |"]
        lines += ["| --- | ---: | ---: | ---: | ---: | ---: |"]
        for r in mine:
            bits = "unquantised" if r["bits"] is None else r["bits"]
            lines.append(
                f"| {r['policy']} | {bits} | {r['right']}/{r['asked']} | {r['entries']:,} | "
                f"{format_bytes(r['kv_bytes'])} | {r['kv_bytes'] / whole:.2%} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = shared_options(__doc__, "kv-bits")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a prompt")
    parser.add_argument("--questions", type=int, default=2, help="asked at each depth")
    args = parser.parse_args()
    result = {
        **about("measure_kv_bits.py", *sys.argv[1:]),
        "versions": mlx_versions(),
        "length": args.length,
        "depths": DEPTHS,
        "needles": NEEDLES,
        "questions": args.questions,
        "group_size": GROUP_SIZE,
        "rows": [],
    }
    for name in args.models:
        result["rows"] += measure(name, args.length, args.questions)
    write(args.out, result, page(result))
    print(page(result))


if __name__ == "__main__":
    main()
