"""The package's errors: each message is one sentence that says what to change."""

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Option:
    """An option that a message names, with a value of it if it names one; as text, a keyword argument."""

    name: str
    value: Any = None

    def __str__(self) -> str:
        return self.name if self.value is None else f"{self.name}={self.value}"


class SnapKVError(ValueError):
    """A request that can't be carried out as asked.

    Args:
        message: a sentence, or a format string for `values`.
        *values: what the message's `{}` stand for. An `Option` among them, or in an error among them, is written as
            its reader would write it: `max_kv_size=512` in Python, `--max-kv-size 512` on the command line.
    """

    def __init__(self, message: str = "", *values: Any):
        super().__init__(message, *values)
        self._message, self._values = message, values

    def message(self, written: Callable[[Option], str] = str) -> str:
        """The sentence, with its options as `written` writes them."""

        def text(value: Any) -> Any:
            if isinstance(value, SnapKVError):
                return value.message(written)
            return written(value) if isinstance(value, Option) else value

        return self._message.format(*map(text, self._values)) if self._values else self._message

    def __str__(self) -> str:
        return self.message()


class OptionError(SnapKVError):
    """An option's value is not allowed.

    Attributes:
        allowed: the rest of the sentence "the option must be ...".
        got: the value.
    """

    def __init__(self, option: str, allowed: str, got: Any):
        super().__init__("{} must be {}, got {!r}", Option(option), allowed, got)
        self.option, self.allowed, self.got = option, allowed, got


class ConflictError(SnapKVError):
    """Two options exclude each other.

    Attributes:
        options: the two; a group of options may be in words.
    """

    def __init__(self, option: Option, other: Option | str):
        super().__init__("{} can't be combined with {}: drop one of them", option, other)
        self.options = option, other


class UnknownOptionError(SnapKVError):
    """A misspelt or unsupported option; the message lists the known ones."""


class UnsupportedModelError(SnapKVError):
    """A model whose attention can't be captured, or whose entries can't be dropped safely."""


class TrainedLengthWarning(UserWarning):
    """A prompt is longer than its model was trained to read."""


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
