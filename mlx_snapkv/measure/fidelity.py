"""How far a model's predictions move when what came before them is compressed.

text    a text goes on, compressed where a piece of it ends: all tokens judged are read from what is left
known   a question stands behind the piece, and the policy sees it: judged is the full cache's own greedy answer
later   the piece is compressed first, and the question comes to what is left: the same answer is judged
"""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from operator import itemgetter
from statistics import fmean
from typing import Any

from mlx_lm.models.cache import make_prompt_cache

from ..caches.layers import attention_layers
from ..compress.options import Compress
from ..engine.report import NO_POLICY, CompressionReport
from ..entries.quantization import n_bytes
from ..planning.units import format_bytes
from ..sparse.options import Sparse
from .divergence import Reference
from .intervals import difference, interval
from .methods import FULL_CACHE, KNOWN, LATER, Method
from .reading import AnyPolicy, Reading, n_ahead, read_once, read_sparsely, shares_reading
from .records import Record, Results
from .tables import Page, Summary, Table, grouped, table_of
from .texts import Frame, Piece, frame_of

TEXT = "text"
FIDELITY_SETTINGS = (TEXT, KNOWN, LATER)
AFTER = "after the compression"  # which tokens are judged
FIDELITY_REMARK = (
    "All methods get the same texts and answers. KL: the divergence of the predictions with the compressed cache from "
    "those with the full cache, in nats per token; 0 means no difference. Against the first: how much higher the KL is "
    "than the first policy's. Same token: the share of tokens for which both predict the same token. Loss: the full "
    "cache's mean negative log-probability of the text's own tokens, in nats, and how much higher a policy's is. All "
    "figures are means over a piece's scored tokens, then over the pieces; 95% intervals are paired and bootstrapped "
    "over texts. Entries: kept per KV head, the mean over layers. KV memory: the entries held at the compression, "
    "without spare room."
)
# By setting: what the heading says, and what is judged.
JUDGED = {
    TEXT: (
        "Text after the piece",
        "The prompt is a piece of a text, and the tokens after it are scored; no policy has a lookahead.",
    ),
    KNOWN: (
        "The full cache's answer, question known",
        "The prompt that is compressed is the piece and a question. The answer's tokens are scored from the first that "
        "is decoded after the compression; those before it don't count. A policy with another lookahead has other "
        "tokens scored, so it has no difference to the first policy.",
    ),
    LATER: (
        "The full cache's answer, question later",
        "The piece is compressed before the question and the answer are read.",
    ),
}


def run(
    model: Any,
    tokenizer: Any,
    pieces: Sequence[Piece],
    methods: Sequence[Method],
    settings: Sequence[str],
    questions: Sequence[str],
    n: int,
    results: Results,
    on_piece: Callable[[bool], None] = lambda measured: None,
) -> list[Record]:
    """The records of all pieces, settings and methods; see `Results.complete`.

    Args:
        questions: each piece is asked one of them, in turn, where it is asked any.
        n: tokens of an answer, at most.
    """
    policies = {method.name: method.policy for method in methods}
    asked = [None] if set(settings) == {TEXT} else questions
    framed = [(question, frame_of(tokenizer, question)) for question in asked]

    def document(piece: Piece, question: str | None, frame: Frame):
        def measure(missing: list[Record]) -> Iterable[Record]:
            own = [policies[cell["method"]] for cell in missing]
            wanted = {cell["setting"] for cell in missing}
            read = read_piece(model, piece, frame, own, wanted, n, tokenizer.eos_token_ids)
            for cell in missing:
                setting = cell["setting"]
                yield cell | judge(setting, *read[setting], policies[cell["method"]])

        place = {"document": piece.document, "piece": piece.number}
        asked = {setting: None if setting == TEXT else question for setting in settings}
        pairs = itertools.product(settings, policies)
        return [
            {"method": m, "setting": s, **place, "question": asked[s]} for s, m in pairs
        ], measure

    each = (document(piece, *frame) for piece, frame in zip(pieces, itertools.cycle(framed)))
    return results.complete(each, on_piece)


def without_lookahead(setting: AnyPolicy | None) -> AnyPolicy | None:
    """Return the setting for a text that nothing answers."""
    if not isinstance(setting, Compress) or not n_ahead(setting):
        return setting
    decode_policy: Any = dataclasses.replace(setting.decode_policy, lookahead=0)  # type: ignore[call-arg]
    is_alone = setting.decode_policy is setting.policy
    return Compress(decode_policy) if is_alone else Compress(setting.policy, decode_policy)


def read_piece(
    model: Any,
    piece: Piece,
    frame: Frame,
    policies: Sequence[AnyPolicy | None],
    settings: Collection[str],
    n: int,
    stops: Collection[int],
) -> dict[str, tuple[Reading, Reference]]:
    """By setting, what is compressed, read once for all policies, and what is judged.

    Args:
        n: tokens of an answer, at most; `stops` end it.
    """
    found: dict[str, tuple[Reading, Reference]] = {}
    bare = [without_lookahead(policy) for policy in policies]
    text = None
    if set(settings) != {TEXT}:
        tokens = [*frame.before, *piece.tokens]
        asked = read_once(model, tokens, [*policies, *bare], [frame.after])
        prompt = asked.followed_by(frame.after)
        answer = Reference(prompt, prompt.answer(n, stops))
        found |= {KNOWN: (prompt, answer), LATER: (asked, answer)}
        text = asked if frame.start == frame.before else None
    if TEXT in settings:
        text = text or read_once(model, [*frame.start, *piece.tokens], bare)
        # The full cache says which token comes first after a piece; it is fed, and those after it are judged.
        found[TEXT] = text, Reference(text, piece.following, n_fed=1)
    return found


def judge(setting: str, reading: Reading, reference: Reference, policy: AnyPolicy | None) -> Record:
    """A policy's figures, or the full cache's; some of them are arrays."""
    known = setting == KNOWN
    is_sparse = isinstance(policy, Sparse)
    predictions, held = None, []
    if known and policy is not None and not shares_reading(policy):
        cache = make_prompt_cache(reading.model)
        on_report = lambda report: held.append(_held(reading, cache, report))  # noqa: E731
        predictions = reference.generated(policy, on_report, prompt_cache=cache)
    else:
        if is_sparse:  # a question that comes later is read as a turn, but for the token that begins the answer
            later = reference.prompt[len(reading.tokens) : -1]
            cache, report = read_sparsely(reading.model, policy, reading.tokens, later)  # type: ignore[arg-type]
        else:
            chosen = policy if known else without_lookahead(policy)
            cache, report = reading.compressed(chosen, answering=known)
        held.append(_held(reading, cache, report))
    if predictions is None:
        predictions = reference.predictions(cache) if policy else reference.logprobs
    figures = reference.figures(predictions)
    figures["loss"] = reference.loss(predictions) if setting == TEXT else None
    return {"tokens": len(reference), "judged": len(predictions), **figures, **held[0]}


def _held(reading: Reading, cache: list, report: CompressionReport) -> Record:
    """What a cache holds once it is compressed: entries, the mean over layers, and their bytes."""
    held = [layer.entries_in(cache).held() for layer in attention_layers(reading.model, cache)]
    kept = [n for n in report.entries_kept if n is not None]
    stays = report.kv_bytes_staying
    return {
        "entries": round(fmean(kept)) if kept else report.prompt_tokens,
        "kv_bytes": report.kv_bytes_after
        if stays
        else sum(n_bytes((e.stored_keys, e.stored_values)) for e in held),
        "reason": None if report.policy == NO_POLICY else report.reason,
    }


def summarise(records: list[Record]) -> Summary:
    """One JSON object a setting and method, in that order."""
    found = []
    for setting in FIDELITY_SETTINGS:
        own = grouped([r for r in records if r["setting"] == setting], "method")
        first = next(
            (rows for (name,), rows in own.items() if name != FULL_CACHE),
            own.get((FULL_CACHE,), []),
        )
        found += [_summary(rows, own[FULL_CACHE,], first) for rows in own.values()]
    return found


def _summary(own: list[Record], full: list[Record], first: list[Record]) -> Record:
    """A method's figures; records of the full cache and of the first policy are of the same pieces, in order.

    A piece whose answer ended before the compression is not judged, and a mean over none is None.
    """
    judged = [i for i, r in enumerate(own) if r["judged"]]

    def apart(key: str, others: list[Record]) -> dict[str, float] | None:
        ours, theirs = ([some[i][key] for i in judged] for some in (own, others))
        return difference(ours, theirs, [own[i]["document"] for i in judged]) if judged else None

    paired = all(r["judged"] == other["judged"] for r, other in zip(own, first))
    has_loss = own[0]["setting"] == TEXT
    return {
        "method": own[0]["method"],
        "setting": own[0]["setting"],
        "pieces": len(own),
        "texts": len({r["document"] for r in own}),
        "tokens": sum(r["tokens"] for r in own),
        "judged": sum(r["judged"] for r in own),
        "unjudged": len(own) - len(judged),
        "kl": apart("kl", full),
        "kl_against_first": apart("kl", first) if paired else None,
        "same": fmean(own[i]["same"] for i in judged) if judged else None,
        "loss": fmean(r["loss"] for r in own) if has_loss else None,
        "loss_against_full": apart("loss", full) if has_loss else None,
        "entries": max(r["entries"] for r in own),
        "kv_bytes": max(r["kv_bytes"] for r in own),
        "reason": next((r["reason"] for r in own if r["reason"]), None),
    }


def tables(summary: Summary) -> list[Table]:
    """One a setting."""
    return [_table(own, setting) for (setting,), own in grouped(summary, "setting").items()]


def _table(summary: Summary, setting: str) -> Table:
    heading, about = JUDGED[setting]
    one = summary[0]
    what = "tokens of the answers" if setting == KNOWN else "tokens scored"
    counts = f"Pieces: {one['pieces']}; texts: {one['texts']}; {what}: {one['tokens']:,}."
    ended = "{unjudged} of {pieces} answers are not scored: they ended before {method} had compressed their prompt."
    remarks = [counts, about, *(ended.format_map(s) for s in summary if s["unjudged"])]
    first = next((s for s in summary if s["method"] != FULL_CACHE), None)

    def kl(s: Record, key: str = "kl", form: str = ".3f") -> str:
        return interval(s[key], form) if one["texts"] > 1 else format(s[key]["mean"], form)

    def against_first(s: Record) -> str:
        if s["method"] == FULL_CACHE or s is first or s["kl"] is None:
            return ""
        key = "kl_against_first"
        return "other tokens" if s[key] is None else kl(s, key, "+.3f")

    columns: dict[str, Callable[[Record], str]] = {
        "method": itemgetter("method"),
        "KL": lambda s: (
            "0" if s["method"] == FULL_CACHE else "not scored" if s["kl"] is None else kl(s)
        ),
        "against the first": against_first,
        "same token": lambda s: "" if s["same"] is None else f"{s['same']:.1%}",
    }
    if setting == TEXT:
        full, other = "{loss:.3f}".format_map, "{loss_against_full[mean]:+.3f}".format_map
        columns["loss"] = lambda s: (full if s["method"] == FULL_CACHE else other)(s)
    if setting == KNOWN:
        columns["tokens scored"] = lambda s: "" if s["method"] == FULL_CACHE else f"{s['judged']:,}"
    columns["entries"] = "{entries:,}".format_map
    columns["KV memory"] = lambda s: format_bytes(s["kv_bytes"])
    return table_of(heading, " ".join(remarks), columns, summary)


FIDELITY_PAGE = Page("Fidelity to the full cache", FIDELITY_REMARK, summarise, tables)
