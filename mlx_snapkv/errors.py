"""The package's errors: each message is one sentence that says what to change."""

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class SnapKVError(ValueError):
    """A request that can't be carried out as asked."""


class UnknownOptionError(SnapKVError):
    """A misspelt or unsupported option; the message lists the known ones."""


# Options of earlier releases, and what is there instead.
GONE = {
    "refresh": "is gone: sparse=budget=6.25% lets every token choose what it reads, and a policy with memory=recall "
    "chooses once a turn"
}


def require_current(names: Iterable[str]) -> None:
    """Raises: UnknownOptionError: an option has been replaced."""
    for name in GONE.keys() & set(names):
        raise UnknownOptionError(f"{name} {GONE[name]}")


class UnsupportedModelError(SnapKVError):
    """A model whose attention can't be captured, or whose entries can't be dropped safely."""


class TrimError(SnapKVError):
    """A rewind past the tokens of the last update, whose evicted entries are gone."""


class EntryFileError(SnapKVError):
    """Entries in files, perhaps at `path`, can't be kept, or are not what was saved: no mistake of whoever asks."""

    def __init__(self, message: str, path: Path | None = None):
        super().__init__(message)
        self.path = path


class Missing:
    """Stands for something that nobody gave: to ask for more than is `known` is an error that says what to do."""

    def __init__(self, sentence: str, **known: Any):
        vars(self).update(known, _sentence=sentence)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise SnapKVError(self._sentence)


def brief(error: BaseException) -> str:
    """The error's kind and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def sentence(error: BaseException) -> str:
    """What an error says, in one line."""
    if isinstance(error, SnapKVError):
        return " ".join(str(error).split())
    return "stopped" if isinstance(error, KeyboardInterrupt) else brief(error)


def suggestion(word: str, known: Iterable[str]) -> str:
    """A parenthesis with the close match, if there is one."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
