"""Measure how SnapKV's lookahead changes later tokens, by its length; writes docs/lookahead.json.

    make real-models
    python scripts/make_ruler.py MODEL real-models/ruler/NAME --length 2048
    python scripts/measure_lookahead.py --models MODEL; make docs

The full cache gives the tokens of a lookahead, whatever is kept, so they are not scored. Texts: the predictions of the
text's own tokens after the lookahead are scored. Facts: a fact is asked for in the answer's first tokens, and after a
preamble that is longer than any lookahead. A prompt is read once. Results stay in build/lookahead, and a later run
continues from them.
"""

import copy
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import mlx.core as mx
import numpy_attention
from evaluation.columns import string_match_all
from results_page import ROOT, Result, shared_options

from mlx_snapkv.cli.loading import load_model
from mlx_snapkv.measure.compare import decode
from mlx_snapkv.measure.divergence import Reference, divergence
from mlx_snapkv.measure.intervals import difference
from mlx_snapkv.measure.methods import FULL_CACHE
from mlx_snapkv.measure.reading import Reading, read_once
from mlx_snapkv.measure.records import Record, Results
from mlx_snapkv.measure.tables import grouped
from mlx_snapkv.measure.texts import Piece, Texts, around, frame_of
from mlx_snapkv.planning.settings import resolve_compress

LENGTHS = (0, 8, 16, 32, 64)  # tokens of the lookahead
POLICIES = {n: resolve_compress(policy=f"snapkv:budget=12.5%,lookahead={n}") for n in LENGTHS}
LENGTH = 1400  # tokens of a piece
JUDGED = 64  # tokens scored after a lookahead
# Name of a span of scored tokens: the lookahead that they follow. The lookahead's last token is read on the full cache,
# too, and predicts one more token, which is not scored.
SPANS = {f"{n + 2} to {n + 1 + JUDGED}": n for n in LENGTHS[-2:]}
TASKS = ("niah_single_3", "niah_multivalue")
# Settings of a question: the fact is in the answer's first tokens, or after the preamble.
FIRST, LATER = "first", "later"
PREAMBLE = (
    "Thank you for the question. The text above is long and speaks of many different things, so I have gone through "
    "all of it with care, from its beginning to its end, before I answer. You ask me for something that stands "
    "somewhere in the middle of that text, and you want me to say it again exactly as it is written there. "
)
MAX_TOKENS = 48  # tokens of an answer after its given beginning


def measure_text(model, tokenizer, piece: Piece) -> Iterator[Record]:
    """Yield KL and the share of equal predictions for the text's own tokens, by span and lookahead."""
    tokens = [*frame_of(tokenizer, None).start, *piece.tokens]
    reading = read_once(model, tokens, POLICIES.values())
    reading.force(piece.following)
    reference = Reference(reading, piece.following)
    for n, policy in POLICIES.items():
        found = reference.predictions(reading.compress(policy, answering=True)[0])
        full = reference.logprobs[-len(found) :]
        kl, same = divergence(full, found), mx.argmax(full, axis=-1) == mx.argmax(found, axis=-1)
        for span, behind in SPANS.items():
            if n <= behind:
                end = len(found) - len(piece.following) + behind + 1 + JUDGED
                own = slice(end - JUDGED, end)
                figures = {"kl": kl[own].mean().item(), "same": same[own].mean().item()}
                yield {"method": str(n), "setting": span, **figures}


def measure_question(model, tokenizer, row: Record) -> Iterator[Record]:
    """Yield scores and answers, by setting and lookahead."""
    before, after = around(tokenizer)
    prompt = tokenizer.encode(before + row["context"], add_special_tokens=False)
    prompt += tokenizer.encode(row["question"] + after, add_special_tokens=False)
    begun = tokenizer.encode(row["answer_prefix"], add_special_tokens=False)
    later = tokenizer.encode(PREAMBLE + row["answer_prefix"], add_special_tokens=False)
    reading = read_once(model, prompt, POLICIES.values(), [begun])
    first = reading.followed_by(begun)
    reading.force(later)
    for setting, asked, n in ((FIRST, first, 0), (LATER, reading, len(later))):
        for method, answer in answers(tokenizer, asked, n):
            score = string_match_all(row["answer"], answer)
            yield {"method": method, "setting": setting, "score": score, "answer": answer}


def answers(tokenizer, reading: Reading, n_forced: int) -> Iterator[tuple[str, str]]:
    """Yield the answers of the full cache and of each lookahead, without their first `n_forced` tokens."""
    full = reading.answer(n_forced + MAX_TOKENS, tokenizer.eos_token_ids)
    yield FULL_CACHE, tokenizer.decode(full[n_forced:])
    reference = Reference(reading, full)
    for n, policy in POLICIES.items():
        if len(full) <= max(1, n) + 1:
            yield str(n), tokenizer.decode(full[n_forced:])
            continue
        cache, report = reading.compress(policy, answering=True)
        n_same = max(n_forced, reference.n_agreed(copy.deepcopy(cache)))
        answer = decode(
            reading.model,
            tokenizer,
            reading.tokens,
            n_forced + MAX_TOKENS,
            cache,
            report,
            begun=full[:n_same],
        )
        yield str(n), tokenizer.decode(answer.tokens[n_forced:])


def measure(model, tokenizer, pieces: list[Piece], rows: list[Record], results: Results):
    """Measure the texts and questions whose records are missing, and return all records."""

    def document(place: Record, cells: list[Record], measured: Any, subject: Any):
        def missing_of(missing: list[Record]) -> Iterator[Record]:
            yield from ({**place, **record} for record in measured(model, tokenizer, subject))

        return [{**place, **cell} for cell in cells], missing_of

    spans = [{"method": str(n), "setting": s} for s, m in SPANS.items() for n in LENGTHS if n <= m]
    names = [FULL_CACHE, *map(str, LENGTHS)]
    asked = [{"method": m, "setting": s} for s, m in itertools.product((FIRST, LATER), names)]
    texts = (
        document({"task": "text", "document": p.document}, spans, measure_text, p) for p in pieces
    )
    questions = (
        document({"task": r["task"], "document": r["number"]}, asked, measure_question, r)
        for r in rows
    )
    return results.complete(itertools.chain(texts, questions))


def ruler(folder: Path, most: int) -> list[Record]:
    """Return the first `most` questions of each task."""
    lines = [
        (folder / f"{task}.jsonl").read_text(encoding="utf-8").splitlines()[:most] for task in TASKS
    ]
    each = itertools.chain.from_iterable(map(enumerate, lines))
    return [json.loads(line) | {"number": number} for number, line in each]


def summary(records: list[Record]) -> Iterator[Record]:
    """Yield a row for each task, setting and lookahead."""
    for (task, setting), own in grouped(records, "task", "setting").items():
        by_method = {name: rows for (name,), rows in grouped(own, "method").items()}
        for name, rows in by_method.items():
            known = {"task": task, "setting": setting, "lookahead": name, "n": len(rows)}
            key = "kl" if task == "text" else "score"
            places = [r["document"] for r in rows]
            scores, none, full = (
                [r[key] for r in some]
                for some in (rows, by_method["0"], by_method.get(FULL_CACHE, []))
            )
            known[key] = difference(scores, [0] * len(rows), places)
            known["against_none"] = difference(scores, none, places)
            if full:
                known["against_full"] = difference(scores, full, places)
            else:
                known["same"] = fmean(r["same"] for r in rows)
            yield known


def main() -> None:
    """Measure each model, keep its records for a later run, and add the rows of the summary."""
    numpy_attention.install()
    parser = shared_options(__doc__, "lookahead")
    parser.set_defaults(models=["real-models/smollm2-135m-instruct"])
    parser.add_argument(
        "--pieces", type=int, default=24, help="number of pieces of essays, one from each"
    )
    parser.add_argument("--asked", type=int, default=16, help="questions a task")
    parser.add_argument("--folder", type=Path, default=Path("real-models"))
    parser.add_argument("--records", type=Path, default=ROOT / "build" / "lookahead")
    args = parser.parse_args()
    args.records.mkdir(parents=True, exist_ok=True)
    result = Result(args.out, length=LENGTH)
    for name in args.models:
        model, tokenizer = load_model(name)
        short = Path(name).name
        texts = Texts([str(args.folder / "essays")])
        pieces = texts.pieces(tokenizer, LENGTH, LENGTHS[-1] + 1 + JUDGED, args.pieces)
        rows = ruler(args.folder / "ruler" / short / "2048", args.asked)
        setting, path = {"model": short, "length": LENGTH}, args.records / f"{short}.jsonl"
        with Results(setting, path) as records:
            measured = measure(model, tokenizer, pieces, rows, records)
        for row in summary(measured):
            result.add({"model": short} | row)


if __name__ == "__main__":
    main()
