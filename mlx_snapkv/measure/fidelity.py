"""Measure how much a model's predictions change when the tokens before them are compressed, on pieces of texts.

The setting says what is compressed and which tokens are judged:

text    a piece is compressed, and the text's tokens after it are judged
known   a piece and a question are compressed together, and the full cache's greedy answer is judged
later   a piece is compressed, then the question is read, and the full cache's greedy answer is judged
"""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from operator import itemgetter
from statistics import fmean
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ..caches.layers import attention_layers
from ..compress.options import Compress
from ..engine.report import NO_POLICY, CompressionReport
from ..entries.quantization import n_bytes
from ..planning.settings import Setting
from ..planning.units import format_bytes
from ..sparse.options import Sparse
from .divergence import Reference
from .intervals import difference, interval
from .methods import FULL_CACHE, KNOWN, LATER, Method
from .reading import Reading, lookahead_of, read_once, read_sparsely, shares_reading
from .records import Measure, Results
from .tables import Page, Record, Summary, Table, grouped, table_of
from .texts import Frame, Piece, frame_of

TEXT = "text"
FIDELITY_SETTINGS = (TEXT, KNOWN, LATER)
JUDGED_TOKENS = "after the compression"  # noted in result files
FIDELITY_REMARK = (
    "All methods get the same texts and answers. KL: the divergence of the predictions with the compressed cache from "
    "those with the full cache, in nats per token; 0 means no difference. Against the first: how much higher the KL is "
    "than the first policy's. Same token: the share of tokens for which both predict the same token. Loss: the full "
    "cache's mean negative log-probability of the text's own tokens, in nats, and how much higher a policy's is. All "
    "figures are means over a piece's scored tokens, then over the pieces; 95% intervals are paired and bootstrapped "
    "over texts. Entries: kept per KV head, the mean over layers. KV memory: the entries held at the compression, "
    "without spare room."
)
# The title and the remark of each setting's table.
SETTING_TEXTS = {
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
    """Measure the pieces with all methods in all settings, and return the records; see `Results.complete`.

    Args:
        model: an mlx-lm model.
        tokenizer: its tokenizer.
        pieces: the pieces of the user's texts.
        methods: the full cache, policies and sparse attention.
        settings: some of `FIDELITY_SETTINGS`.
        questions: the questions about the pieces; they take turns.
        n: limit of an answer's tokens.
        results: the records of earlier runs, to which missing records are added.
        on_piece: called after each piece, with whether anything was measured.
    """
    policies = {method.name: method.policy for method in methods}
    used_questions = [None] if set(settings) == {TEXT} else questions
    frames = [(question, frame_of(tokenizer, question)) for question in used_questions]

    def keys_and_measure(
        piece: Piece, question: str | None, frame: Frame
    ) -> tuple[list[Record], Measure]:
        """Return the keys of a piece's records, and the function that measures missing records."""

        def measure(missing: list[Record]) -> Iterable[Record]:
            missing_policies = [policies[record["method"]] for record in missing]
            missing_settings = {record["setting"] for record in missing}
            by_setting = read_piece(
                model,
                piece,
                frame,
                missing_policies,
                missing_settings,
                n,
                stops=tokenizer.eos_token_ids,
            )
            for record, policy in zip(missing, missing_policies):
                reading, reference = by_setting[record["setting"]]
                yield record | judge(record["setting"], reading, reference, policy)

        keys = [
            {
                "method": method,
                "setting": setting,
                "document": piece.document,
                "piece": piece.number,
                "question": None if setting == TEXT else question,
            }
            for setting, method in itertools.product(settings, policies)
        ]
        return keys, measure

    documents = (
        keys_and_measure(piece, question, frame)
        for piece, (question, frame) in zip(pieces, itertools.cycle(frames))
    )
    return results.complete(documents, on_piece)


def without_lookahead(setting: Setting | None) -> Setting | None:
    """Return the setting without lookahead, for a text that is not answered."""
    if not isinstance(setting, Compress) or not lookahead_of(setting):
        return setting
    decode_policy: Any = dataclasses.replace(setting.decode_policy, lookahead=0)  # type: ignore[call-arg]
    if setting.decode_policy is setting.policy:  # one policy for prompt and answer
        return Compress(decode_policy)
    return Compress(setting.policy, decode_policy)


def read_piece(
    model: Any,
    piece: Piece,
    frame: Frame,
    policies: Sequence[Setting | None],
    settings: Collection[str],
    n: int,
    stops: Collection[int],
) -> dict[str, tuple[Reading, Reference]]:
    """Read a piece once for all policies, and return by setting what is compressed and what is judged.

    Args:
        model: an mlx-lm model.
        piece: the piece.
        frame: the tokens around the piece.
        policies: the settings of all methods; None for the full cache.
        settings: some of `FIDELITY_SETTINGS`.
        n: limit of an answer's tokens.
        stops: tokens that end an answer.
    """
    by_setting: dict[str, tuple[Reading, Reference]] = {}
    text_policies = [without_lookahead(policy) for policy in policies]
    text: Reading | None = None
    if set(settings) != {TEXT}:
        tokens = [*frame.before, *piece.tokens]
        before_question = read_once(model, tokens, [*policies, *text_policies], [frame.after])
        prompt = before_question.followed_by(frame.after)
        answer = Reference(prompt, prompt.answer(n, stops))
        by_setting[KNOWN] = prompt, answer
        by_setting[LATER] = before_question, answer
        if frame.start == frame.before:  # the same tokens are read for TEXT
            text = before_question
    if TEXT in settings:
        if text is None:
            text = read_once(model, [*frame.start, *piece.tokens], text_policies)
        # The full cache predicts the first token after the piece. It is fed, and the tokens after it are judged.
        by_setting[TEXT] = text, Reference(text, piece.following, n_fed=1)
    return by_setting


def judge(setting: str, reading: Reading, reference: Reference, policy: Setting | None) -> Record:
    """Return a policy's or the full cache's figures for one piece; some of them are arrays.

    Args:
        setting: one of `FIDELITY_SETTINGS`.
        reading: the text to compress, as `read_piece` returns it for the setting.
        reference: the tokens to judge, as `read_piece` returns them for the setting.
        policy: the method's setting; None for the full cache.
    """
    if setting == KNOWN and policy is not None and not shares_reading(policy):
        predictions, cache_figures = _generated(reading, reference, policy)
    else:
        cache, report = _compressed(setting, reading, reference, policy)
        cache_figures = _cache_figures(reading, cache, report)
        predictions = reference.logprobs if policy is None else reference.predictions(cache)
    return {
        "tokens": len(reference),
        "judged": len(predictions),
        **reference.figures(predictions),
        "loss": reference.loss(predictions) if setting == TEXT else None,
        **cache_figures,
    }


def _generated(reading: Reading, reference: Reference, policy: Setting) -> tuple[mx.array, Record]:
    """Let `generate_step` read the prompt with a policy, and return `Reference.generated` and the cache's figures."""
    cache = make_prompt_cache(reading.model)
    cache_figures: list[Record] = []

    def note_figures(report: CompressionReport) -> None:
        # Noted at the compression, before the answer adds entries.
        cache_figures.append(_cache_figures(reading, cache, report))

    predictions = reference.generated(policy, note_figures, prompt_cache=cache)
    return predictions, cache_figures[0]


def _compressed(
    setting: str, reading: Reading, reference: Reference, policy: Setting | None
) -> tuple[list, CompressionReport]:
    """Return the cache that predicts the judged tokens, and the report of its compression; see `judge`."""
    if isinstance(policy, Sparse):
        # A later question is read as a turn, except its last token, which is fed to predict the first judged one.
        later = reference.prompt[len(reading.tokens) : -1]
        return read_sparsely(reading.model, policy, reading.tokens, later)
    if setting == KNOWN:
        return reading.compressed(policy, answering=True)
    return reading.compressed(without_lookahead(policy))


def _cache_figures(reading: Reading, cache: list, report: CompressionReport) -> Record:
    """Return the entries (mean over layers) and the bytes of a compressed cache, and why it was not compressed."""
    n_kept = [n for n in report.entries_kept if n is not None]
    if report.kv_bytes_staying:
        kv_bytes = report.kv_bytes_after
    else:
        layers = attention_layers(reading.model, cache)
        entries = [layer.entries_in(cache).held() for layer in layers]
        kv_bytes = sum(n_bytes((e.stored_keys, e.stored_values)) for e in entries)
    return {
        "entries": round(fmean(n_kept)) if n_kept else report.prompt_tokens,
        "kv_bytes": kv_bytes,
        "reason": None if report.policy == NO_POLICY else report.reason,
    }


def summarise(records: list[Record]) -> Summary:
    """Return one summary for each setting and method."""
    summaries = []
    for setting in FIDELITY_SETTINGS:
        of_setting = [record for record in records if record["setting"] == setting]
        if not of_setting:
            continue
        by_method = grouped(of_setting, "method")
        full = by_method[FULL_CACHE,]
        # Without a policy, the full cache is compared with itself.
        first = next((rows for (name,), rows in by_method.items() if name != FULL_CACHE), full)
        summaries += [_summary(rows, full, first) for rows in by_method.values()]
    return summaries


def _summary(own: list[Record], full: list[Record], first: list[Record]) -> Record:
    """Summarise a method's records.

    A piece whose answer ended before the compression is left out; a mean over no pieces is None.

    Args:
        own: the method's records, one for each piece.
        full: the full cache's records, about the same pieces in the same order.
        first: the first policy's records, about the same pieces in the same order.
    """
    judged = [i for i, record in enumerate(own) if record["judged"]]
    documents = [own[i]["document"] for i in judged]

    def difference_to(others: list[Record], key: str) -> dict[str, float] | None:
        if not judged:
            return None
        scores = [own[i][key] for i in judged]
        reference = [others[i][key] for i in judged]
        return difference(scores, reference, documents)

    # Differences need the same judged tokens, which another lookahead changes.
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
        "kl": difference_to(full, "kl"),
        "kl_against_first": difference_to(first, "kl") if paired else None,
        "same": fmean(own[i]["same"] for i in judged) if judged else None,
        "loss": fmean(r["loss"] for r in own) if has_loss else None,
        "loss_against_full": difference_to(full, "loss") if has_loss else None,
        "entries": max(r["entries"] for r in own),
        "kv_bytes": max(r["kv_bytes"] for r in own),
        "reason": next((r["reason"] for r in own if r["reason"]), None),
    }


def tables(summary: Summary) -> list[Table]:
    """Return one table for each setting."""
    return [_table(rows, setting) for (setting,), rows in grouped(summary, "setting").items()]


def _table(summary: Summary, setting: str) -> Table:
    """Return the table of one setting, with a row for each method."""
    heading, about = SETTING_TEXTS[setting]
    any_method = summary[0]  # the counts are those of all methods
    n_texts = any_method["texts"]
    tokens = "tokens of the answers" if setting == KNOWN else "tokens scored"
    counts = (
        f"Pieces: {any_method['pieces']}; texts: {n_texts}; {tokens}: {any_method['tokens']:,}."
    )
    remarks = [counts, about]
    for s in summary:
        if s["unjudged"]:
            ended = f"they ended before {s['method']} had compressed their prompt."
            remarks.append(f"{s['unjudged']} of {s['pieces']} answers are not scored: {ended}")
    first = next((s for s in summary if s["method"] != FULL_CACHE), None)

    def with_interval(figure: dict[str, float], form: str) -> str:
        return interval(figure, form) if n_texts > 1 else format(figure["mean"], form)

    def kl(s: Record) -> str:
        if s["method"] == FULL_CACHE:
            return "0"
        return "not scored" if s["kl"] is None else with_interval(s["kl"], ".3f")

    def kl_against_first(s: Record) -> str:
        if s["method"] == FULL_CACHE or s is first or s["kl"] is None:
            return ""
        figure = s["kl_against_first"]
        return "other tokens" if figure is None else with_interval(figure, "+.3f")

    def loss(s: Record) -> str:
        if s["method"] == FULL_CACHE:
            return f"{s['loss']:.3f}"
        return f"{s['loss_against_full']['mean']:+.3f}"

    columns: dict[str, Callable[[Record], str]] = {
        "method": itemgetter("method"),
        "KL": kl,
        "against the first": kl_against_first,
        "same token": lambda s: "" if s["same"] is None else f"{s['same']:.1%}",
    }
    if setting == TEXT:
        columns["loss"] = loss
    if setting == KNOWN:
        columns["tokens scored"] = lambda s: "" if s["method"] == FULL_CACHE else f"{s['judged']:,}"
    columns["entries"] = "{entries:,}".format_map
    columns["KV memory"] = lambda s: format_bytes(s["kv_bytes"])
    return table_of(heading, " ".join(remarks), columns, summary)


FIDELITY_PAGE = Page("Fidelity to the full cache", FIDELITY_REMARK, summarise, tables)
