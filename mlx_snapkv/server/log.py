"""The server's log: a line for each request, and warnings that it repeats for no request."""

import logging
import re

log = logging.getLogger("mlx_snapkv.server")

MAX_KINDS = 1000  # kinds of warnings to remember; clients can cause any number
KIND_LENGTH = 120  # characters by which kinds are compared


def show_log() -> None:
    """Print the log on stderr, with a line for each request. Without a call, Python prints only warnings."""
    log.setLevel(logging.INFO)
    log.addHandler(logging.StreamHandler())


class LoggedOnce:
    """Logs a warning of each kind once during the life of the server.

    Sentences that differ only in their numbers are of one kind.
    """

    def __init__(self) -> None:
        """Start before the first warning."""
        self._kinds: set[str] = set()

    def warn(self, sentence: str, kind: str | None = None) -> None:
        """Log a sentence, unless one of its kind was logged; its kind is by default the sentence itself."""
        text = sentence if kind is None else kind
        key = re.sub(r"\d+", "0", text)[:KIND_LENGTH]
        if key not in self._kinds and len(self._kinds) < MAX_KINDS:
            self._kinds.add(key)
            log.warning("%s", sentence)
