"""The package's errors. Each message is one sentence that says what to change."""

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Option:
    """An option that a message names, with or without a value; `str` writes it as a keyword argument."""

    name: str
    value: Any = None

    def __str__(self) -> str:
        """Return the option as a keyword argument, such as "max_kv_size=512"; the name alone without a value."""
        return self.name if self.value is None else f"{self.name}={self.value}"


class SnapKVError(ValueError):
    """A request can't be carried out as asked.

    Args:
        message: a sentence, or a format string for `values`.
        *values: the values for the message's `{}`. An `Option` is written as its reader would write it:
            `max_kv_size=512` in Python, `--max-kv-size 512` on the command line. A value may be another `SnapKVError`.
    """

    def __init__(self, message: str = "", *values: Any):
        """Keep message and values apart, so that `message` can write each option for its reader."""
        super().__init__(message, *values)
        self._message = message
        self._values = values

    def message(self, written: Callable[[Option], str] = str) -> str:
        """Return the sentence, in which `written` writes each option."""

        def text(value: Any) -> Any:
            if isinstance(value, SnapKVError):
                return value.message(written)
            return written(value) if isinstance(value, Option) else value

        if not self._values:  # then the message is no format string, and may contain braces
            return self._message
        return self._message.format(*map(text, self._values))

    def __str__(self) -> str:
        """Return the sentence with options as keyword arguments of Python."""
        return self.message()


class OptionError(SnapKVError):
    """An option's value is not allowed.

    Attributes:
        option: the option's name.
        allowed: the allowed values, as the end of the sentence "the option must be ...".
        got: the given value.
    """

    def __init__(self, option: str, allowed: str, got: Any):
        """Compose the sentence "OPTION must be ALLOWED, got VALUE"."""
        super().__init__("{} must be {}, got {!r}", Option(option), allowed, got)
        self.option = option
        self.allowed = allowed
        self.got = got


class ConflictError(SnapKVError):
    """Two options exclude each other.

    Attributes:
        options: the two options; the second may be a group of options in words.
    """

    def __init__(self, option: Option, other: Option | str):
        """Compose the sentence, which asks the user to drop one of the two options."""
        super().__init__("{} can't be combined with {}: drop one of them", option, other)
        self.options = option, other


class UnknownOptionError(SnapKVError):
    """An option is misspelt or unsupported; the message lists the known options."""


class UnsupportedModelError(SnapKVError):
    """A model's queries can't be captured, or its entries can't be evicted safely."""


class TrainedLengthWarning(UserWarning):
    """A prompt is longer than its model was trained to read."""


class EntryFileError(SnapKVError):
    """Entries in a file can't be stored or are damaged, which is not a mistake in the request.

    Attributes:
        path: the file or folder; None if unknown.
    """

    def __init__(self, message: str, path: Path | None = None):
        """Take a complete sentence, not a format string."""
        super().__init__(message)
        self.path = path


class Missing:
    """A placeholder for a missing object.

    Args:
        sentence: the message of the `SnapKVError` that any other attribute raises.
        **known: the attributes that the placeholder has.
    """

    def __init__(self, sentence: str, **known: Any):
        """Make a placeholder that has only the `known` attributes."""
        vars(self).update(known, _sentence=sentence)

    def __getattr__(self, name: str) -> Any:
        """Raise the placeholder's SnapKVError; an AttributeError for names such as `__deepcopy__`."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise SnapKVError(self._sentence)


def brief(error: BaseException) -> str:
    """Return an error's class and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def sentence(error: BaseException) -> str:
    """Return an error's message in one line."""
    if isinstance(error, SnapKVError):
        return " ".join(str(error).split())
    return "stopped" if isinstance(error, KeyboardInterrupt) else brief(error)


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return " (did you mean 'NAME'?)" with the known name closest to `word`; "" if none is close."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
