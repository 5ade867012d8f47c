"""The server's log: one line per request, and warnings that are not repeated."""

import logging
import re

log = logging.getLogger("mlx_snapkv.server")

MAX_KINDS = 1000  # maximum number of kinds to remember, because clients can cause any number
KIND_LENGTH = 120  # kinds are compared by this many characters


def show_log() -> None:
    """Print the log, with a line per request, on stderr. Without this call, Python prints only warnings."""
    log.setLevel(logging.INFO)
    log.addHandler(logging.StreamHandler())


class LoggedOnce:
    """Logs a warning of each kind only once.

    Sentences that differ only in their numbers are of the same kind.
    """

    def __init__(self) -> None:
        """Start without warnings."""
        self._kinds: set[str] = set()

    def warn(self, sentence: str, kind: str | None = None) -> None:
        """Log a sentence, unless one of its kind was logged before. The default kind is the sentence itself."""
        text = sentence if kind is None else kind
        key = re.sub(r"\d+", "0", text)[:KIND_LENGTH]
        if key not in self._kinds and len(self._kinds) < MAX_KINDS:
            self._kinds.add(key)
            log.warning("%s", sentence)
