"""Measure how much compression changes a model's predictions, on pieces of text.

The setting determines what is compressed and which predictions are compared:

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
from .intervals import LEAST_TEXTS, difference, interval
from .methods import FULL_CACHE, KNOWN, LATER, Method
from .reading import Reading, lookahead_of, read_once, shares_reading
from .records import Results
from .sparse_reading import read_for_sparse
from .tables import Page, Record, Summary, Table, grouped, table_of
from .texts import Frame, Piece, frame_of

TEXT = "text"
FIDELITY_SETTINGS = (TEXT, KNOWN, LATER)
JUDGED_TOKENS = "after the compression"  # describes the judged tokens in result files
FIDELITY_REMARK = (
    "All methods get the same texts and answers. KL: the divergence of the predictions with the compressed cache from "
    "those with the full cache, in nats per token; 0 means no difference. Against the first: how much higher the KL is "
    "than the first policy's. Same token: the share of tokens for which both predict the same token. Loss: the full "
    "cache's mean negative log-probability of the text's own tokens, in nats, and how much higher a policy's is. These "
    "figures are means over a piece's scored tokens, then over the pieces. The 95% intervals are paired and "
    f"bootstrapped over texts; there are none for fewer than {LEAST_TEXTS} scored texts. Entries: kept per KV head, or "
    "read by a token with sparse attention; the mean over layers, and the maximum over pieces. KV memory: the maximum "
    "over pieces of the entries held at the compression, without spare room; with sparse attention, all entries, the "
    "index and the means in memory, and once more the entries that one token reads."
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
    max_tokens: int,
    results: Results,
    on_piece: Callable[[], None] = lambda: None,
) -> list[Record]:
    """Measure every piece with every method in every setting and return the records.

    Records that `results` already contains are not measured again.

    Args:
        model: an mlx-lm model.
        tokenizer: the model's tokenizer.
        pieces: pieces of the user's texts.
        methods: the methods to measure. One of them must be the full cache.
        settings: settings to measure, from `FIDELITY_SETTINGS`.
        questions: questions to ask about the pieces, in turn.
        max_tokens: maximum number of tokens in an answer.
        results: records of earlier runs. New records are added.
        on_piece: called after each piece.
    """
    policies = {method.name: method.policy for method in methods}
    # The text setting asks no question.
    used_questions = [None] if set(settings) == {TEXT} else questions
    questions_and_frames = [
        (question, frame_of(tokenizer, question)) for question in used_questions
    ]

    def measure(piece: Piece, frame: Frame, missing: list[Record]) -> Iterator[Record]:
        """Yield a piece's records for the `missing` keys."""
        missing_policies = [policies[keys["method"]] for keys in missing]
        reading_by_setting = read_piece(
            model,
            piece,
            frame,
            missing_policies,
            settings={keys["setting"] for keys in missing},
            max_tokens=max_tokens,
            stop_tokens=tokenizer.eos_token_ids,
        )
        for keys, policy in zip(missing, missing_policies):
            setting = keys["setting"]
            reading, reference = reading_by_setting[setting]
            yield keys | judge(setting, reading, reference, policy)

    documents = (
        (_record_keys(piece, question, settings, policies), partial(measure, piece, frame))
        for piece, (question, frame) in zip(pieces, itertools.cycle(questions_and_frames))
    )
    return results.complete(documents, on_piece)


def _record_keys(
    piece: Piece, question: str | None, settings: Sequence[str], methods: Iterable[str]
) -> list[Record]:
    """Return the keys of a piece's records. There is one record per setting and method."""
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


def without_lookahead(setting: Setting | None) -> Setting | None:
    """Return a policy without its lookahead, for text that is compressed before an answer begins.

    Sparse attention and the full cache (None) are returned unchanged.
    """
    if not isinstance(setting, Compress) or not lookahead_of(setting):
        return setting
    decode_policy: Any = dataclasses.replace(setting.decode_policy, lookahead=0)  # type: ignore[call-arg]
    is_single_policy = setting.decode_policy is setting.policy
    if is_single_policy:
        return Compress(decode_policy)
    return Compress(setting.policy, decode_policy)


def read_piece(
    model: Any,
    piece: Piece,
    frame: Frame,
    policies: Sequence[Setting | None],
    settings: Collection[str],
    max_tokens: int,
    stop_tokens: Collection[int],
) -> dict[str, tuple[Reading, Reference]]:
    """Read a piece once for all policies.

    Args:
        model: an mlx-lm model.
        piece: the piece.
        frame: tokens before and after the piece.
        policies: each method's policy or sparse attention, or None for the full cache.
        settings: settings to measure, from `FIDELITY_SETTINGS`.
        max_tokens: maximum number of tokens in an answer.
        stop_tokens: tokens that end an answer.

    Returns: The reading to compress and the tokens to judge, by setting.
    """
    reading_by_setting: dict[str, tuple[Reading, Reference]] = {}
    text_policies = [without_lookahead(policy) for policy in policies]
    text_reading: Reading | None = None
    has_question = set(settings) != {TEXT}
    if has_question:
        tokens = [*frame.before, *piece.tokens]
        before_question = read_once(model, tokens, [*policies, *text_policies], [frame.after])
        whole_prompt = before_question.followed_by(frame.after)
        answer = Reference(whole_prompt, whole_prompt.answer(max_tokens, stop_tokens))
        reading_by_setting[KNOWN] = whole_prompt, answer
        reading_by_setting[LATER] = before_question, answer
        if frame.start == frame.before:  # TEXT reads the same tokens, so it can share the reading
            text_reading = before_question
    if TEXT in settings:
        if text_reading is None:
            text_reading = read_once(model, [*frame.start, *piece.tokens], text_policies)
        # Don't judge the first token after the piece: prefill predicts it, before compression.
        following_text = Reference(text_reading, piece.following, n_fed=1)
        reading_by_setting[TEXT] = text_reading, following_text
    return reading_by_setting


def judge(setting: str, reading: Reading, reference: Reference, policy: Setting | None) -> Record:
    """Return a method's figures for one piece. Some figures are scalar arrays.

    Args:
        setting: one of `FIDELITY_SETTINGS`.
        reading: the reading to compress, from `read_piece`.
        reference: the tokens to judge, from `read_piece`.
        policy: the method's policy or sparse attention, or None for the full cache.
    """
    if setting == KNOWN and policy is not None and not shares_reading(policy):
        predictions, cache_figures = _predictions_of_own_reading(reading, reference, policy)
    else:
        cache, report = _compressed_cache(setting, reading, reference, policy)
        cache_figures = _cache_figures(reading, cache, report)
        predictions = reference.logprobs if policy is None else reference.predictions(cache)
    return {
        "tokens": len(reference),
        "judged": len(predictions),
        **reference.kl_and_same(predictions),
        "loss": reference.loss(predictions) if setting == TEXT else None,
        **cache_figures,
    }


def _predictions_of_own_reading(
    reading: Reading, reference: Reference, policy: Setting
) -> tuple[mx.array, Record]:
    """Read the prompt with `generate_step`, and return the predictions and the cache's figures."""
    cache = make_prompt_cache(reading.model)
    figures_by_report: list[Record] = []

    def note_figures(report: CompressionReport) -> None:
        # Take the figures now, before the rest of the answer adds entries.
        figures_by_report.append(_cache_figures(reading, cache, report))

    predictions = reference.generate(policy, note_figures, prompt_cache=cache)
    (cache_figures,) = figures_by_report  # there is exactly one report
    return predictions, cache_figures


def _compressed_cache(
    setting: str, reading: Reading, reference: Reference, policy: Setting | None
) -> tuple[list, CompressionReport]:
    """Return the cache to predict the judged tokens from, and its compression report."""
    if isinstance(policy, Sparse):
        # If there is a question, read it as a later turn, except for its last token. `Reference.predictions` feeds that
        # token, to get the prediction of the first judged token.
        later_tokens = reference.prompt[len(reading.tokens) : -1]
        return read_for_sparse(reading, policy, later_tokens)
    if setting == KNOWN:
        return reading.compress(policy, answering=True)
    return reading.compress(without_lookahead(policy))


def _cache_figures(reading: Reading, cache: list, report: CompressionReport) -> Record:
    """Return the mean entry count over layers, the KV bytes and, if the policy compressed nothing, the reason."""
    counts_by_layer = [n_entries for n_entries in report.entries_kept if n_entries is not None]
    if report.kv_bytes_staying:
        kv_bytes = report.kv_bytes_after
    else:
        layers = attention_layers(reading.model, cache)
        entries_of_layers = [layer.layer_cache_in(cache).held() for layer in layers]
        kv_bytes = sum(
            count_bytes((entries.stored_keys, entries.stored_values))
            for entries in entries_of_layers
        )
    return {
        "entries": round(fmean(counts_by_layer)) if counts_by_layer else report.prompt_tokens,
        "kv_bytes": kv_bytes,
        "reason": None if report.policy == NO_POLICY else report.reason,
    }


def summarise(records: list[Record]) -> Summary:
    """Summarise the records by setting and method."""
    summaries = []
    for setting in FIDELITY_SETTINGS:
        setting_records = [record for record in records if record["setting"] == setting]
        if not setting_records:
            continue
        records_by_method = {
            method: method_records
            for (method,), method_records in grouped(setting_records, "method").items()
        }
        full_records = records_by_method[FULL_CACHE]
        policy_names = [name for name in records_by_method if name != FULL_CACHE]
        # If no method has a policy, the full cache is compared with itself.
        first_records = records_by_method[policy_names[0]] if policy_names else full_records
        for method_records in records_by_method.values():
            summaries.append(_summary(method_records, full_records, first_records))
    return summaries


def _summary(
    records: list[Record], full_records: list[Record], first_records: list[Record]
) -> Record:
    """Summarise one method's records.

    Pieces whose answers ended before compression are left out of the means. A mean over no pieces is None.

    Args:
        records: the method's records, one per piece.
        full_records: the full cache's records for the same pieces.
        first_records: the first policy's records for the same pieces.
    """
    judged_pieces = [i for i, record in enumerate(records) if record["judged"]]
    documents = [records[i]["document"] for i in judged_pieces]

    def difference_to(others: list[Record], key: str) -> dict[str, float] | None:
        if not judged_pieces:
            return None
        scores = [records[i][key] for i in judged_pieces]
        reference = [others[i][key] for i in judged_pieces]
        return difference(scores, reference, documents)

    # A difference is only meaningful if both methods judge the same tokens. Their lookaheads determine which tokens are
    # judged.
    judges_same_tokens = all(
        record["judged"] == first_record["judged"]
        for record, first_record in zip(records, first_records)
    )
    any_record = records[0]
    has_loss = any_record["setting"] == TEXT
    reasons = [record["reason"] for record in records if record["reason"]]
    return {
        "method": any_record["method"],
        "setting": any_record["setting"],
        "pieces": len(records),
        "texts": len({record["document"] for record in records}),
        "scored_texts": len(set(documents)),
        "tokens": sum(record["tokens"] for record in records),
        "judged": sum(record["judged"] for record in records),
        "unjudged": len(records) - len(judged_pieces),
        "kl": difference_to(full_records, "kl"),
        "kl_against_first": difference_to(first_records, "kl") if judges_same_tokens else None,
        "same": fmean(records[i]["same"] for i in judged_pieces) if judged_pieces else None,
        "loss": fmean(record["loss"] for record in records) if has_loss else None,
        "loss_against_full": difference_to(full_records, "loss") if has_loss else None,
        "entries": max(record["entries"] for record in records),
        "kv_bytes": max(record["kv_bytes"] for record in records),
        "reason": reasons[0] if reasons else None,
    }


def tables(summary: Summary) -> list[Table]:
    """Return one table per setting."""
    return [_table(rows, setting) for (setting,), rows in grouped(summary, "setting").items()]


def _table(summary: Summary, setting: str) -> Table:
    """Return a setting's table, with one row per method."""
    heading, _ = SETTING_TEXTS[setting]
    policy_rows = [row for row in summary if not _is_full_cache(row)]

    def kl(row: Record) -> str:
        if _is_full_cache(row):
            return "0"
        return (
            "not scored" if row["kl"] is None else interval(row["kl"], ".3f", row["scored_texts"])
        )

    def kl_against_first(row: Record) -> str:
        if _is_full_cache(row) or row is policy_rows[0] or row["kl"] is None:
            return ""
        figure = row["kl_against_first"]
        return "other tokens" if figure is None else interval(figure, "+.3f", row["scored_texts"])

    def loss(row: Record) -> str:
        if _is_full_cache(row):
            return f"{row['loss']:.3f}"
        return f"{row['loss_against_full']['mean']:+.3f}"

    columns: dict[str, Callable[[Record], str]] = {
        "method": itemgetter("method"),
        "KL": kl,
        "against the first": kl_against_first,
        "same token": lambda row: "" if row["same"] is None else f"{row['same']:.1%}",
    }
    if setting == TEXT:
        columns["loss"] = loss
    if setting == KNOWN:
        columns["tokens scored"] = lambda row: "" if _is_full_cache(row) else f"{row['judged']:,}"
    columns["entries"] = "{entries:,}".format_map
    columns["KV memory"] = lambda row: format_bytes(row["kv_bytes"])
    return table_of(heading, _remark(summary, setting), columns, summary)


def _remark(summary: Summary, setting: str) -> str:
    """Return the remark of a setting's table: counts, what is scored, and what is not scored."""
    _, about = SETTING_TEXTS[setting]
    counts = summary[0]  # the same for all methods
    tokens = "tokens of the answers" if setting == KNOWN else "tokens scored"
    counts_text = (
        f"Pieces: {counts['pieces']}; texts: {counts['texts']}; {tokens}: {counts['tokens']:,}."
    )
    remarks = [counts_text, about]
    for row in summary:
        if row["unjudged"]:
            why = f"they ended before {row['method']} had compressed their prompt."
            remarks.append(f"{row['unjudged']} of {row['pieces']} answers are not scored: {why}")
    return " ".join(remarks)


def _is_full_cache(row: Record) -> bool:
    """Return whether a row of the summary is the full cache's."""
    return row["method"] == FULL_CACHE


FIDELITY_PAGE = Page("Fidelity to the full cache", FIDELITY_REMARK, summarise, tables)
