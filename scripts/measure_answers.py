"""Measure how close answers come to the full cache's, by when entries are chosen; writes docs/answers.json.

    make real-models
    python scripts/make_ruler.py MODEL real-models/ruler/NAME --length 2048
    python scripts/measure_answers.py --models MODEL; make docs

Each method is fed the full cache's own answer, token by token, and its predictions are compared with the full cache's.
"""

import copy
import itertools
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import numpy_attention
from mlx_lm.models.cache import make_prompt_cache
from results_page import Result, clock, shared_options

from mlx_snapkv import generate_step
from mlx_snapkv.cli.loading import load_model
from mlx_snapkv.engine.prefill import read
from mlx_snapkv.measure.divergence import divergence
from mlx_snapkv.measure.tables import grouped
from mlx_snapkv.sparse import index

TASKS = ("niah_single_2", "niah_multivalue", "niah_multiquery")
SUMMARY = "Summarise the text above in three sentences."
CHARACTERS = 6000  # length of an essay
# Last tokens of a prompt, with its question. Each sparse method reads them itself; a policy reads the whole prompt.
LAST_TOKENS = 64
ONCE, SPARSE = "snapkv:budget={}%", "budget={}%,read=dense,when=always"
# Name: options with a place for the budget in percent, and the most entries for which exact votes replace the index.
WAYS = {
    "SnapKV, once": ({"policy": ONCE}, index.EXACT_ENTRIES),
    "sparse, by its votes": ({"sparse": SPARSE}, sys.maxsize),
    "sparse, by the index": ({"sparse": SPARSE}, 0),
}

# Kind, the user's message, first words of the answer, limit for the answer's tokens.
Case = tuple[str, str, str, int]


def cases(folder: Path, ruler: Path, asked: int) -> Iterator[Case]:
    """Yield `asked` questions of each RULER task, and `asked` essays to summarise."""
    for task in TASKS:
        lines = (ruler / f"{task}.jsonl").read_text(encoding="utf-8").splitlines()
        for row in map(json.loads, lines[:asked]):
            yield "needles", row["context"] + row["question"], row["answer_prefix"], 32
    texts = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.txt"))]
    for text in [text for text in texts if len(text) > CHARACTERS][:asked]:
        yield "essays", f"{text[:CHARACTERS]}\n\n{SUMMARY}", "", 64


def prompt_of(tokenizer, text: str, begun: str) -> list[int]:
    """Return the tokens of a message and of the answer's first words, in the chat template if there is one."""
    if not tokenizer.has_chat_template:
        return tokenizer.encode(text + begun)
    message = {"role": "user", "content": text}
    prompt = tokenizer.apply_chat_template([message], add_generation_prompt=True)
    return prompt + tokenizer.encode(begun, add_special_tokens=False)


def answered(model, caches: list, last: list[int], tokens: list[int], **options: Any):
    """Decode an answer whose tokens are given; return log-probabilities `(n, vocab_size)`, and seconds per token."""
    forced = itertools.chain(tokens, itertools.repeat(0))
    options |= {
        "sampler": lambda _: mx.array([next(forced)]),
        "prompt_cache": copy.deepcopy(caches),
    }
    found, times = [], [clock()]
    for _, logprobs in generate_step(mx.array(last), model, max_tokens=len(tokens), **options):
        found.append(logprobs.astype(mx.float32))
        mx.eval(found[-1])
        times.append(clock())
    return mx.stack(found), (times[-1] - times[1]) / (len(tokens) - 1)


def compared(model, tokenizer, case: Case, shares: list[int]) -> Iterator[dict[str, Any]]:
    """Yield a row for each method and share of entries read."""
    kind, text, begun, most = case
    prompt, caches = prompt_of(tokenizer, text, begun), make_prompt_cache(model)
    before, last = prompt[:-LAST_TOKENS], prompt[-LAST_TOKENS:]
    read(model, mx.array(before), caches, {"prefill_step_size": 512})
    given = {"max_tokens": most, "prompt_cache": copy.deepcopy(caches)}
    tokens = [token for token, _ in generate_step(mx.array(last), model, **given)]
    full, plain_seconds = answered(model, caches, last, tokens)
    for share, (way, (options, few)) in itertools.product(shares, WAYS.items()):
        given = {name: text.format(100 / share) for name, text in options.items()}
        # A policy reads the whole prompt; sparse attention continues from the caches.
        start = (make_prompt_cache(model), prompt) if "policy" in given else (caches, last)
        with patch.object(index, "EXACT_ENTRIES", few):
            found, seconds = answered(model, *start, tokens, **given)
        same = mx.argmax(full, axis=-1) == mx.argmax(found, axis=-1)
        yield {
            "kind": kind,
            "way": way,
            "share": share,
            "kl": float(divergence(full, found).mean()),
            "same": float(same.astype(mx.float32).mean()),
            "speed": plain_seconds / seconds,
        }


def main() -> None:
    """Measure each model, and add a row for each kind of question, share and way of choosing."""
    numpy_attention.install()
    parser = shared_options(__doc__, "answers")
    parser.set_defaults(models=["real-models/smollm2-135m-instruct"])
    parser.add_argument("--asked", type=int, default=8, help="questions a task, and essays")
    parser.add_argument("--shares", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--folder", type=Path, default=Path("real-models"))
    args = parser.parse_args()
    result = Result(args.out, asked=args.asked)
    for name in args.models:
        model, tokenizer = load_model(name)
        ruler = args.folder / "ruler" / Path(name).name / "2048"
        rows = []
        for case in cases(args.folder / "essays", ruler, args.asked):
            rows += compared(model, tokenizer, case, args.shares)
        for (kind, share, way), own in grouped(rows, "kind", "share", "way").items():
            means = {key: statistics.mean(r[key] for r in own) for key in ("kl", "same", "speed")}
            known = {"model": Path(name).name, "kind": kind, "share": share, "way": way}
            result.add(known | {"n": len(own)} | means)


if __name__ == "__main__":
    main()
