"""Measure how much compression changes a model's predictions, on pieces of texts.

The setting determines what is compressed, and for which tokens predictions are compared:

    text    a piece is compressed, and the text's next tokens are predicted
    known   a piece and a question are compressed together, and the full cache's greedy answer is predicted
    later   a piece is compressed, then the question is read, and the full cache's greedy answer is predicted
"""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from statistics import fmean
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ..caches.layers import attention_layers
from ..compress.options import Compress
from ..engine.report import NO_POLICY, CompressionReport
from ..entries.quantization import count_bytes
from ..planning.settings import Setting
from ..planning.units import format_bytes
from ..sparse.options import Sparse
from .divergence import Reference
from .intervals import difference, interval
from .methods import FULL_CACHE, KNOWN, LATER, Method
from .reading import Reading, lookahead_of, read_once, read_sparsely, shares_reading
from .records import Results
from .tables import Page, Record, Summary, Table, grouped, table_of
from .texts import Frame, Piece, frame_of

TEXT = "text"
FIDELITY_SETTINGS = (TEXT, KNOWN, LATER)
JUDGED_TOKENS = "after the compression"  # recorded in the settings of result files
FIDELITY_REMARK = (
    "All methods get the same texts and answers. KL: the divergence of the predictions with the compressed cache from "
    "those with the full cache, in nats per token; 0 means no difference. Against the first: how much higher the KL is "
    "than the first policy's. Same token: the share of tokens for which both predict the same token. Loss: the full "
    "cache's mean negative log-probability of the text's own tokens, in nats, and how much higher a policy's is. All "
    "figures are means over a piece's scored tokens, then over the pieces; 95% intervals are paired and bootstrapped "
    "over texts. Entries: kept per KV head, the mean over layers. KV memory: the entries held at the compression, "
    "without spare room."
)
# Title and remark of each setting's table.
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
    """Measure every piece with every method in every setting and return the records.

    See `Results.complete`.

    Args:
        model: an mlx-lm model.
        tokenizer: its tokenizer.
        pieces: pieces of the user's texts.
        methods: the full cache, policies and sparse attention.
        settings: some of `FIDELITY_SETTINGS`.
        questions: questions about the pieces, used in turn.
        n: maximum number of tokens in an answer.
        results: records of earlier runs, to which missing records are added.
        on_piece: called after each piece; the argument says whether anything was measured.
    """
    policies = {method.name: method.policy for method in methods}
    used_questions = [None] if set(settings) == {TEXT} else questions
    frames = [(question, frame_of(tokenizer, question)) for question in used_questions]

    measure = partial(_measure_piece, model, tokenizer, policies, n)
    documents = (
        (_record_keys(piece, question, settings, policies), partial(measure, piece, frame))
        for piece, (question, frame) in zip(pieces, itertools.cycle(frames))
    )
    return results.complete(documents, on_piece)


def _record_keys(
    piece: Piece, question: str | None, settings: Sequence[str], methods: Iterable[str]
) -> list[Record]:
    """Return the keys of a piece's records, one per setting and method."""
    return [
        {
            "method": method,
            "setting": setting,
            "document": piece.document,
            "piece": piece.number,
            "question": None if setting == TEXT else question,
        }
        for setting, method in itertools.product(settings, methods)
    ]


def _measure_piece(
    model: Any,
    tokenizer: Any,
    policies: dict[str, Setting | None],
    n: int,
    piece: Piece,
    frame: Frame,
    missing: list[Record],
) -> Iterator[Record]:
    """Measure a piece for each of the `missing` keys and yield the records.

    Args:
        model: an mlx-lm model.
        tokenizer: its tokenizer.
        policies: setting of each method, by name; None for the full cache.
        n: maximum number of tokens in an answer.
        piece: the piece.
        frame: tokens before and after the piece.
        missing: keys of the records to measure.
    """
    missing_policies = [policies[keys["method"]] for keys in missing]
    missing_settings = {keys["setting"] for keys in missing}
    stops = tokenizer.eos_token_ids
    by_setting = read_piece(model, piece, frame, missing_policies, missing_settings, n, stops)
    for keys, policy in zip(missing, missing_policies):
        reading, reference = by_setting[keys["setting"]]
        yield keys | judge(keys["setting"], reading, reference, policy)


def without_lookahead(setting: Setting | None) -> Setting | None:
    """Return the setting without lookahead, for texts without an answer."""
    if not isinstance(setting, Compress) or not lookahead_of(setting):
        return setting
    decode_policy: Any = dataclasses.replace(setting.decode_policy, lookahead=0)  # type: ignore[call-arg]
    if setting.decode_policy is setting.policy:  # the same policy for prompt and answer
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
    """Read a piece once for all policies.

    Args:
        model: an mlx-lm model.
        piece: the piece.
        frame: tokens before and after the piece.
        policies: settings of all methods; None for the full cache.
        settings: some of `FIDELITY_SETTINGS`.
        n: maximum number of tokens in an answer.
        stops: tokens that end an answer.

    Returns: The text to compress and the tokens to judge, by setting.
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
        # The full cache predicts the first token after the piece, so that token is fed, and the following ones are
        # judged.
        by_setting[TEXT] = text, Reference(text, piece.following, n_fed=1)
    return by_setting


def judge(setting: str, reading: Reading, reference: Reference, policy: Setting | None) -> Record:
    """Return a method's figures for one piece. Some of them are scalar arrays.

    Args:
        setting: one of `FIDELITY_SETTINGS`.
        reading: the text to compress, from `read_piece`.
        reference: the tokens to judge, from `read_piece`.
        policy: the method's setting; None for the full cache.
    """
    if setting == KNOWN and policy is not None and not shares_reading(policy):
        predictions, cache_figures = _generate(reading, reference, policy)
    else:
        cache, report = _compressed_cache(setting, reading, reference, policy)
        cache_figures = _cache_figures(reading, cache, report)
        predictions = reference.logprobs if policy is None else reference.predictions(cache)
    return {
        "tokens": len(reference),
        "judged": len(predictions),
        **reference.figures(predictions),
        "loss": reference.loss(predictions) if setting == TEXT else None,
        **cache_figures,
    }


def _generate(reading: Reading, reference: Reference, policy: Setting) -> tuple[mx.array, Record]:
    """Let `generate_step` read the prompt. Return its predictions and its cache's figures."""
    cache = make_prompt_cache(reading.model)
    cache_figures: list[Record] = []

    def note_figures(report: CompressionReport) -> None:
        # Take the figures at the compression, because the answer adds entries later.
        cache_figures.append(_cache_figures(reading, cache, report))

    predictions = reference.generate(policy, note_figures, prompt_cache=cache)
    return predictions, cache_figures[0]


def _compressed_cache(
    setting: str, reading: Reading, reference: Reference, policy: Setting | None
) -> tuple[list, CompressionReport]:
    """Return the cache that predicts the judged tokens, and the report on its compression."""
    if isinstance(policy, Sparse):
        # The question is read as a later turn. Its last token is left out, because feeding it predicts the first judged
        # token.
        later = reference.prompt[len(reading.tokens) : -1]
        return read_sparsely(reading.model, policy, reading.tokens, later)
    if setting == KNOWN:
        return reading.compress(policy, answering=True)
    return reading.compress(without_lookahead(policy))


def _cache_figures(reading: Reading, cache: list, report: CompressionReport) -> Record:
    """Return a cache's mean entries per layer, its bytes, and the reason if it was not compressed."""
    n_kept = [n for n in report.entries_kept if n is not None]
    if report.kv_bytes_staying:
        kv_bytes = report.kv_bytes_after
    else:
        layers = attention_layers(reading.model, cache)
        entries = [layer.layer_cache_in(cache).held() for layer in layers]
        kv_bytes = sum(count_bytes((e.stored_keys, e.stored_values)) for e in entries)
    return {
        "entries": round(fmean(n_kept)) if n_kept else report.prompt_tokens,
        "kv_bytes": kv_bytes,
        "reason": None if report.policy == NO_POLICY else report.reason,
    }


def summarise(records: list[Record]) -> Summary:
    """Summarise the records by setting and method."""
    summaries = []
    for setting in FIDELITY_SETTINGS:
        of_setting = [record for record in records if record["setting"] == setting]
        if not of_setting:
            continue
        by_method = grouped(of_setting, "method")
        full = by_method[FULL_CACHE,]
        # If no method has a policy, the full cache is compared with itself.
        first = next((rows for (name,), rows in by_method.items() if name != FULL_CACHE), full)
        summaries += [_summary(rows, full, first) for rows in by_method.values()]
    return summaries


def _summary(own: list[Record], full: list[Record], first: list[Record]) -> Record:
    """Summarise one method's records.

    Pieces whose answers ended before the compression are left out. A mean over no pieces is None.

    Args:
        own: the method's records, one per piece.
        full: the full cache's records for the same pieces.
        first: the first policy's records for the same pieces.
    """
    judged = [i for i, record in enumerate(own) if record["judged"]]
    documents = [own[i]["document"] for i in judged]

    def difference_to(others: list[Record], key: str) -> dict[str, float] | None:
        if not judged:
            return None
        scores = [own[i][key] for i in judged]
        reference = [others[i][key] for i in judged]
        return difference(scores, reference, documents)

    # Differences are computed over the same judged tokens only, and these depend on the lookahead.
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
    """Return one table per setting."""
    return [_table(rows, setting) for (setting,), rows in grouped(summary, "setting").items()]


def _table(summary: Summary, setting: str) -> Table:
    """Return a setting's table, with one row per method."""
    heading, about = SETTING_TEXTS[setting]
    any_method = summary[0]  # counts are the same for all methods
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
