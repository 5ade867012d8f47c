"""The options of a request other than its policy or sparse attention. Each is declared once, here."""

from dataclasses import dataclass, field, fields
from typing import Any

from ..errors import OptionError


def option(help: str, *values: Any, changes_entries: bool = True) -> Any:
    """Return a field of `RequestOptions`, which is None unless the caller sets it.

    Args:
        help: a sentence for `--help` and the docs.
        *values: the allowed values; none given allows all.
        changes_entries: whether entries depend on it. If so, saved files note it, and prefixes are found by it.
    """
    return field(
        default=None, metadata={"help": help, "values": values, "changes": changes_entries}
    )


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """The options of a request other than its policy or sparse attention.

    Each field is a flag of every command that reads prompts, a keyword of `generate_step`, `prefill`, conversations and
    batches, a note in saved files, and a part of the key that a server finds prefixes by.

    Raises: SnapKVError: a value is not allowed.
    """

    store: str | None = option(
        "Where --sparse keeps entries: memory (the default), 8bit, 4bit or file."
    )
    store_dir: str | None = option(
        "Folder for --store file; default: TMPDIR.", changes_entries=False
    )

    def __post_init__(self) -> None:
        """Check every value. Raises: OptionError: a value is not allowed."""
        for each in fields(RequestOptions):
            name, allowed = each.name, each.metadata["values"]
            value = getattr(self, name)
            if value is not None and allowed and value not in allowed:
                *others, last = [str(each) for each in allowed]
                in_words = f"{', '.join(others)} or {last}" if others else last
                raise OptionError(name, in_words, value)

    @property
    def keywords(self) -> dict[str, Any]:
        """Return the options as keywords of `generate_step`, `Conversation` and batches."""
        return {name: getattr(self, name) for name in OPTIONS}


def noted(keywords: dict[str, Any]) -> dict[str, Any]:
    """Return the options among `keywords` that entries depend on."""
    return {name: value for name, value in keywords.items() if name in ENTRY_OPTIONS}


OPTIONS = tuple(each.name for each in fields(RequestOptions))
ENTRY_OPTIONS = tuple(each.name for each in fields(RequestOptions) if each.metadata["changes"])
