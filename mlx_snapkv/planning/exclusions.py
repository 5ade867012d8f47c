"""Which options of a request exclude each other: one table, which every way in asks.

What a model or a prompt's length excludes beside that is in `CompressionConfig.require` and `plan_request`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from ..caches.memories import in_files
from ..errors import SnapKVError


class When(IntEnum):
    """From when on options exclude each other."""

    GIVEN = 1  # in any case
    CHOSEN = 2  # "auto" has chosen, if that was left to it
    COMPRESSING = 3  # the prompt is not left to mlx-lm as it is


@dataclass(frozen=True)
class Exclusion:
    """Options that exclude each other; the `sentence`, with their values as `{o.memory}`, says why and what to do."""

    names: tuple[str, ...]
    when: When
    holds: Callable[[Any], bool]  # of a `CompressionConfig`, whether it combines them
    sentence: str


EXCLUSIONS = (
    Exclusion(
        ("verify", "memory"),
        When.GIVEN,
        lambda o: o.verify is not None and in_files(o.memory),
        "verify=all needs all entries in memory, and with memory={o.memory} they are not there: give memory=recall, "
        "recall:8bit or recall:4bit, or drop verify",
    ),
    Exclusion(
        ("sparse", "kv_bits"),
        When.GIVEN,
        lambda o: o.is_sparse and o.quantization is not None,
        "kv_bits quantises the entries that a policy keeps, and sparse keeps all: give memory=recall:8bit or "
        "recall:4bit instead",
    ),
    Exclusion(
        ("policy", "memory"),
        When.GIVEN,
        lambda o: o.evicts and o.retains and o.reads_in_blocks,
        "memory={o.memory} keeps all entries, but {o.policy} evicts while it reads: give sparse instead, which reads a "
        "prompt of any length in the same memory, or memory=drop",
    ),
    Exclusion(
        ("policy", "memory"),
        When.GIVEN,
        lambda o: o.evicts and o.retains and o.accumulates_attention,
        "memory={o.memory} needs a policy that chooses by keys or by the last queries, but {o.policy} sums the "
        "attention of all queries: use snapkv, for example, or memory=drop",
    ),
    Exclusion(
        ("policy", "memory"),
        When.GIVEN,
        lambda o: o.evicts and o.retains and o.reads_again,
        "memory={o.memory} needs a policy that chooses by keys or by the last queries, but {o.policy} chooses once for "
        "all questions: use snapkv, for example, or memory=drop",
    ),
    Exclusion(
        ("draft_model", "sparse"),
        When.CHOSEN,
        lambda o: o.has_draft_model and o.is_sparse,
        "draft_model can't be combined with sparse: drop one of them",
    ),
    Exclusion(
        ("draft_model", "memory"),
        When.CHOSEN,
        lambda o: o.has_draft_model and o.retains,
        "draft_model can't be combined with memory={o.memory}: drop one of them",
    ),
    Exclusion(
        ("verify", "policy"),
        When.CHOSEN,
        lambda o: o.verify is not None and o.evicts,
        "verify={o.verify} gives the full cache's own answer by sparse attention, but {o.policy} evicts the entries "
        "that it needs: give sparse instead, or drop verify",
    ),
    Exclusion(
        ("verify", "sparse"),
        When.CHOSEN,
        lambda o: o.verify is not None and o.policy is None,
        "verify={o.verify} gives the full cache's own answer by sparse attention, but without a policy the full cache "
        "gives that answer anyway: give sparse instead, or drop verify",
    ),
    Exclusion(
        ("max_kv_size", "policy", "sparse"),
        When.COMPRESSING,
        lambda o: o.max_kv_size is not None,
        "max_kv_size can't be combined with a policy or sparse attention: drop one of them",
    ),
    Exclusion(
        ("draft_model", "kv_bits"),
        When.COMPRESSING,
        lambda o: o.has_draft_model and o.quantization is not None,
        "a draft model can't check quantised entries exactly: drop kv_bits",
    ),
    Exclusion(
        ("draft_model", "policy"),
        When.COMPRESSING,
        lambda o: o.has_draft_model and o.evicts and o.policy.stages[1].observes_answer,
        "{o.policy.stages[1].name} with schedule=block lets every answer token vote, and the votes of rejected drafts "
        "can't be undone: use schedule=once, or drop draft_model",
    ),
    Exclusion(
        ("memory",),
        When.CHOSEN,
        lambda o: o.is_text and o.retains and o.policy is None,
        "memory={o.memory} keeps a text's entries for questions to come, but no policy was given: give sparse instead, "
        "or drop the memory",
    ),
    Exclusion(
        ("memory", "policy"),
        When.CHOSEN,
        lambda o: o.is_text and o.retains and o.evicts,
        "memory={o.memory} keeps a text's entries for questions to come, but {o.policy} chooses when a question is "
        "there: give sparse instead, or drop the memory",
    ),
)


def require_compatible(options: Any, when: When) -> None:
    """Raises: SnapKVError: a `CompressionConfig` combines what can't be, as far as that is known by then."""
    for exclusion in EXCLUSIONS:
        if exclusion.when <= when and exclusion.holds(options):
            raise SnapKVError(exclusion.sentence.format(o=options))
