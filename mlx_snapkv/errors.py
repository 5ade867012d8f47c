"""The package's exceptions. A message is a single sentence that says what is wrong and, if possible, what to change."""

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Option:
    """An option to mention in an error message, with or without a value."""

    name: str
    value: Any = None

    def __str__(self) -> str:
        """Return the option as a keyword argument, e.g. "max_kv_size=512", or just its name if it has no value."""
        return self.name if self.value is None else f"{self.name}={self.value}"


class SnapKVError(ValueError):
    """Base class for the package's errors, raised if a request can't be carried out.

    Args:
        message: a sentence, or a format string if there are `values`.
        *values: values for the `{}` fields in the message. An `Option` is formatted as `max_kv_size=512` in Python and
            as `--max-kv-size 512` on the command line. A value can also be another `SnapKVError`.
    """

    def __init__(self, message: str = "", *values: Any):
        """Store the message unformatted, because the command line writes options differently."""
        super().__init__(message, *values)
        self._message = message
        self._values = values

    def message(self, written: Callable[[Option], str] = str) -> str:
        """Return the message, using `written` to format options."""

        def text(value: Any) -> Any:
            if isinstance(value, SnapKVError):
                return value.message(written)
            return written(value) if isinstance(value, Option) else value

        if not self._values:  # not a format string, so it may contain braces
            return self._message
        return self._message.format(*map(text, self._values))

    def __str__(self) -> str:
        """Return the message with options formatted as Python keyword arguments."""
        return self.message()


class OptionError(SnapKVError):
    """An option's value is not allowed.

    Attributes:
        option: name of the option.
    """

    def __init__(self, option: str, allowed: str, got: Any):
        """Create the error with the message "OPTION must be ALLOWED, got VALUE"."""
        super().__init__("{} must be {}, got {!r}", Option(option), allowed, got)
        self.option = option


class ConflictError(SnapKVError):
    """Two options can't be combined."""

    def __init__(self, option: Option, other: Option | str):
        """Create the error. `other` is the second option, or text that describes several options."""
        super().__init__("{} can't be combined with {}: drop one of them", option, other)


class UnknownOptionError(SnapKVError):
    """An option, a policy or a command is misspelt or not supported."""


class UnsupportedModelError(SnapKVError):
    """The model does not support the request, for example because its entries can't be evicted safely."""


class TrainedLengthWarning(UserWarning):
    """A prompt is longer than the model's trained length."""


class EntryFileError(SnapKVError):
    """A file of entries is damaged, or can't be read or written. The request itself is valid.

    Attributes:
        path: the damaged file, if it belongs to a saved prompt. None for all other errors.
    """

    def __init__(self, message: str, path: Path | None = None):
        """Create the error with a complete message, not a format string."""
        super().__init__(message)
        self.path = path


class Missing:
    """A placeholder for a missing object. Using it raises `SnapKVError`.

    Args:
        sentence: the error message.
        **known: attributes that can be read without an error.
    """

    def __init__(self, sentence: str, **known: Any):
        """Create a placeholder with only the `known` attributes."""
        vars(self).update(known, _sentence=sentence)

    def __getattr__(self, name: str) -> Any:
        """Raise SnapKVError, or AttributeError for special methods such as `__deepcopy__`."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise SnapKVError(self._sentence)


def brief(error: BaseException) -> str:
    """Return an exception's class name and, if it has a message, the message's first line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def sentence(error: BaseException) -> str:
    """Describe an exception in one line.

    Return a `SnapKVError`'s message, "stopped" for Ctrl-C, and the result of `brief` for any other exception.
    """
    if isinstance(error, SnapKVError):
        return " ".join(str(error).split())
    return "stopped" if isinstance(error, KeyboardInterrupt) else brief(error)


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return " (did you mean 'NAME'?)" for the known name closest to `word`, or "" if there is no close match."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
