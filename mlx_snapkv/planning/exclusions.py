"""Which options of a request exclude each other: one table, which every way in asks.

What a model or a prompt's length excludes beside that is in `CompressionConfig.require` and `plan_request`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from ..errors import ConflictError, Option, SnapKVError


class When(IntEnum):
    """From when on options exclude each other."""

    GIVEN = 1  # in any case
    CHOSEN = 2  # "auto" has chosen, if that was left to it
    COMPRESSING = 3  # the prompt is not left to mlx-lm as it is


@dataclass(frozen=True)
class Exclusion:
    """Options that exclude each other, and the error that says why and what to do."""

    names: tuple[str, ...]
    when: When
    holds: Callable[[Any], bool]  # of a `CompressionConfig`, whether it combines them
    error: Callable[[Any], SnapKVError]


def _needs_other_policy(o: Any, why: str) -> SnapKVError:
    return SnapKVError(
        "{} needs a policy that chooses by keys or by the last queries, but {} {}: use snapkv, for example, or {}",
        Option("memory", o.memory),
        o.policy,
        why,
        Option("memory", "drop"),
    )


def _needs_sparse(option: Option, does: str, why: str) -> SnapKVError:
    return SnapKVError(
        "{} {}, but {}: give {} instead, or drop {}",
        option,
        does,
        why,
        Option("sparse"),
        Option(option.name),
    )


def _keeps_a_text(o: Any, why: str) -> SnapKVError:
    return _needs_sparse(
        Option("memory", o.memory), "keeps a text's entries for questions to come", why
    )


EXCLUSIONS = (
    Exclusion(
        ("sparse", "memory"),
        When.GIVEN,
        lambda o: o.is_sparse and o.memory == "drop",
        lambda o: ConflictError(
            Option("sparse"), Option("memory", "drop"), "since sparse attention evicts nothing"
        ),
    ),
    Exclusion(
        ("sparse", "kv_bits"),
        When.GIVEN,
        lambda o: o.is_sparse and o.quantization is not None,
        lambda o: SnapKVError(
            "{} quantises the entries that a policy keeps, and {} keeps all: give {} or recall:4bit instead",
            Option("kv_bits"),
            Option("sparse"),
            Option("memory", "recall:8bit"),
        ),
    ),
    Exclusion(
        ("policy", "memory"),
        When.GIVEN,
        lambda o: o.evicts and o.retains and o.reads_in_blocks,
        lambda o: SnapKVError(
            "{} keeps all entries, but {} evicts while it reads: give {} instead, which reads a prompt of any length "
            "in little memory, or {}",
            Option("memory", o.memory),
            o.policy,
            Option("sparse"),
            Option("memory", "drop"),
        ),
    ),
    Exclusion(
        ("policy", "memory"),
        When.GIVEN,
        lambda o: o.evicts and o.retains and o.accumulates_attention,
        lambda o: _needs_other_policy(o, "sums the attention of all queries"),
    ),
    Exclusion(
        ("draft_model", "sparse"),
        When.CHOSEN,
        lambda o: o.has_draft_model and o.is_sparse,
        lambda o: ConflictError(Option("draft_model"), Option("sparse")),
    ),
    Exclusion(
        ("draft_model", "memory"),
        When.CHOSEN,
        lambda o: o.has_draft_model and o.retains,
        lambda o: ConflictError(Option("draft_model"), Option("memory", o.memory)),
    ),
    Exclusion(
        ("max_kv_size", "policy", "sparse"),
        When.COMPRESSING,
        lambda o: o.max_kv_size is not None,
        lambda o: ConflictError(Option("max_kv_size"), "a policy or sparse attention"),
    ),
    Exclusion(
        ("draft_model", "kv_bits"),
        When.COMPRESSING,
        lambda o: o.has_draft_model and o.quantization is not None,
        lambda o: SnapKVError(
            "a draft model can't check quantised entries exactly: drop {}", Option("kv_bits")
        ),
    ),
    Exclusion(
        ("draft_model", "policy"),
        When.COMPRESSING,
        lambda o: o.has_draft_model and o.evicts and o.policy.stages[1].observes_answer,
        lambda o: SnapKVError(
            "{} with schedule=block lets every answer token vote, and the votes of rejected drafts can't be undone: "
            "use schedule=once, or drop {}",
            o.policy.stages[1].name,
            Option("draft_model"),
        ),
    ),
    Exclusion(
        ("memory",),
        When.CHOSEN,
        lambda o: o.is_text and o.retains and o.policy is None,
        lambda o: _keeps_a_text(o, "no policy was given"),
    ),
    Exclusion(
        ("memory", "policy"),
        When.CHOSEN,
        lambda o: o.is_text and o.retains and o.evicts,
        lambda o: _keeps_a_text(o, f"{o.policy} chooses when a question is there"),
    ),
    Exclusion(
        ("memory",),
        When.CHOSEN,
        lambda o: o.retains and o.policy is None and not (o.is_text or o.turns),
        lambda o: SnapKVError(
            "{} says where entries stay that an answer is not decoded from, but without a policy it is decoded from "
            "all: give {}, for example, or drop {}",
            Option("memory", o.memory),
            Option("sparse"),
            Option("memory"),
        ),
    ),
)


def require_compatible(options: Any, when: When) -> None:
    """Raises: SnapKVError: a `CompressionConfig` combines what can't be, as far as that is known by then."""
    for exclusion in EXCLUSIONS:
        if exclusion.when <= when and exclusion.holds(options):
            raise exclusion.error(options)
