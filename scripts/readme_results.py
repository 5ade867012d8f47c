"""README's table of what was measured, the full cache beside what is compressed."""

from results_page import Row, load, right, table

from mlx_snapkv.evals.methods import FULL
from mlx_snapkv.planning.units import format_bytes

CONTEXT, LONG = 32768, 16384
SNAPKV = "snapkv:budget=12.5%"
AHEAD = "which decodes an answer's first 33 tokens on all entries"
WAYS = {"SnapKV": SNAPKV, "StreamingLLM": "streaming_llm:budget=12.5%,schedule=once"}


def results() -> list[str]:
    rows = [*_quality(), *_ruler(), *_answers(), *_speed(), *_facts()]
    return table(("measured", "full cache", "compressed", "page", "printed by"), rows)


def _row(what: str, full: str, compressed: str, page: str, command: str) -> tuple[str, ...]:
    return what, full, compressed, f"[{page}](docs/{page}.md)", f"`{command}`"


def _quality() -> list[tuple[str, ...]]:
    """KL of text and known answers, of the models measured."""
    rows = []
    for part in load("quality")["parts"]:
        (kind, *_), own = part["part"].split("-"), part["summary"]
        model, first = part["model"].rpartition("/")[2], own[0]
        if kind in ("fidelity", "code"):
            kl = {(s["method"], s["setting"]): f"{s['kl']['mean']:.3f}" for s in own if s["kl"]}
            settings = [s for s in ("text", "known") if (SNAPKV, s) in kl]
            told = "; ".join(
                f"{x} {' and '.join(kl[y, s] for s in settings)}" for x, y in WAYS.items()
            )
            of = "essays" if kind == "fidelity" else "Python code"
            judged = " and ".join({"text": "text", "known": "answers"}[s] for s in settings)
            about = f"(`{model}`, {first['pieces']} pieces of {of}, {part['length']:,} tokens)"
            named = f"KL to the full cache with 1/8 of the entries, {judged}, nats a token {about}"
            rows.append(_row(named, "0", told, "quality", "make eval"))
    return rows


def _ruler() -> list[tuple[str, ...]]:
    """RULER's scores, a row a model and a way, a figure a length."""
    parts = [part for part in load("quality")["parts"] if part["part"].startswith("ruler")]
    same: dict[tuple[str, str], list[dict[str, dict]]] = {}
    for part in parts:
        own = {s["method"]: s for s in part["summary"]}
        same.setdefault((part["model"].rpartition("/")[2], list(own)[-1]), []).append(own)
    rows = []
    for (model, last), owns in same.items():
        told, how = _scores(owns, last), ", each token reading 1/16"
        if SNAPKV in owns[0]:
            ahead = _scores(owns, f"{SNAPKV},lookahead=32")
            told = f"SnapKV {_scores(owns, SNAPKV)}; {ahead} with `lookahead=32`, {AHEAD}"
            how = " with 1/8"
        sizes = ", ".join(f"{o[FULL]['asked']} of {o[FULL]['length']:,} tokens" for o in owns)
        named = f"RULER's score{how} of the entries (`{model}`; questions: {sizes})"
        rows.append(_row(named, _scores(owns, FULL), told, "quality", "make eval"))
    return rows


def _scores(owns: list[dict[str, dict]], method: str) -> str:
    return ", ".join(f"{100 * own[method]['score']:.0f}" for own in owns)


def _answers() -> list[tuple[str, ...]]:
    """KL of the full cache's own answers, by when they choose what they read."""
    rows = []
    for kind, what in (("needles", "RULER's needles"), ("essays", "summaries")):
        own = [r for r in load("answers")["rows"] if r["kind"] == kind and r["share"] == 16]
        told = "; ".join(f"{row['way']} {row['kl']:.3f}" for row in own)
        about = f"`{own[0]['model']}`, {own[0]['n']} answers"
        named = f"KL to the full cache, each token reading 1/16 of the entries, {what} ({about})"
        rows.append(_row(named, "0", f"chosen by {told}", "recall", "make eval"))
    return rows


def _speed() -> list[tuple[str, ...]]:
    result = load("benchmarks")
    older = "; older settings" if result.get("notes") else ""

    def found(context: int, name: str) -> Row:
        own = [row for row in result["speed"] if row["context"] == context]
        return next(row for row in own if row["contender"].lower().startswith(name))

    decoded = [found(CONTEXT, name) for name in ("full cache", "snapkv")]
    read = [found(LONG, name) for name in ("full cache", "keydiff")]
    share = f"SnapKV with 1/{round(CONTEXT / decoded[1]['entries'])} of the entries (random LLaMA{older})"
    what = f"tokens decoded per second after {CONTEXT:,} tokens, and KV memory, {share}"
    reading = (
        f"time to read {LONG:,} tokens, and peak memory, `{read[1]['contender']}` (random LLaMA)"
    )
    rows = {
        what: [
            f"{1 / row['step_seconds']:.1f}, {format_bytes(row['kv_bytes'])}" for row in decoded
        ],
        reading: [
            f"{row['read_seconds']:.1f} s, {format_bytes(row['peak_bytes'])}" for row in read
        ],
    }
    return [_row(name, *pair, "benchmarks", "make bench") for name, pair in rows.items()]


def _facts() -> list[tuple[str, ...]]:
    result = load("facts")
    rows = {
        r["name"]: r for r in result["rows"] if (r["table"], r["model"]) == ("memories", "demo")
    }
    asked = f"{result['facts']} facts of {result['tokens']:,} tokens asked for one a turn"
    found = ", ".join(f"{way} {right(rows[f'SnapKV, {way}'])}" for way in ("recall", "drop"))
    named = f"{asked}, SnapKV with 1/16 (`demo`)"
    return [_row(named, right(rows["full cache"]), found, "recall", "make eval")]
