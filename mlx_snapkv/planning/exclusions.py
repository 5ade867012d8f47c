"""The table of the options that exclude each other.

Options that a model or a prompt's length excludes are in `CompressionConfig.require` and `plan_request`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from ..errors import ConflictError, Option, SnapKVError


class When(IntEnum):
    """When options exclude each other."""

    GIVEN = 1  # when the options are given
    CHOSEN = 2  # once "auto" has chosen a setting
    COMPRESSING = 3  # once it is known that the prompt is compressed


@dataclass(frozen=True)
class Exclusion:
    """Options that exclude each other, and the error that says why and what to do."""

    names: tuple[str, ...]
    when: When
    holds: Callable[[Any], bool]  # whether a `CompressionConfig` combines the options
    error: Callable[[Any], SnapKVError]


def _keeps_all(o: Any, why: str) -> SnapKVError:
    return SnapKVError(
        "{} says where sparse attention keeps all entries, but {}: give {} instead, or drop {}",
        Option("store", o.store),
        why,
        Option("sparse"),
        Option("store"),
    )


EXCLUSIONS = (
    Exclusion(
        ("sparse", "kv_bits"),
        When.GIVEN,
        lambda o: o.sparse is not None and o.quantization is not None,
        lambda o: SnapKVError(
            "{} quantises the entries that a policy keeps, and {} keeps all: give {} or 4bit instead",
            Option("kv_bits"),
            Option("sparse"),
            Option("store", "8bit"),
        ),
    ),
    Exclusion(
        ("policy", "store"),
        When.GIVEN,
        lambda o: o.compress is not None and o.store is not None,
        lambda o: _keeps_all(o, f"{o.compress} evicts"),
    ),
    Exclusion(
        ("draft_model", "sparse"),
        When.CHOSEN,
        lambda o: o.has_draft_model and o.sparse is not None,
        lambda o: ConflictError(Option("draft_model"), Option("sparse")),
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
        lambda o: o.has_draft_model and o.compress and not o.compress.decode_policy.grows,
        lambda o: SnapKVError(
            "a draft model needs a cache that only grows after the prompt, and {} goes on evicting: use snapkv with "
            "on_full=grow, or drop {}",
            o.compress.decode_policy,
            Option("draft_model"),
        ),
    ),
    Exclusion(
        ("store",),
        When.CHOSEN,
        lambda o: o.setting is None and o.store is not None,
        lambda o: _keeps_all(o, "no policy was given"),
    ),
)


def require_compatible(options: Any, when: When) -> None:
    """Raise SnapKVError if a `CompressionConfig` combines options that exclude each other at this time."""
    for exclusion in EXCLUSIONS:
        if exclusion.when <= when and exclusion.holds(options):
            raise exclusion.error(options)
