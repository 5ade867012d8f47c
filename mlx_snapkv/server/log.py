"""The server's log: one line per request, and warnings that are logged only once."""

import logging
import re

log = logging.getLogger("mlx_snapkv.server")

# Maximum number of kinds of warning to log. Clients could cause any number of them.
MAX_KINDS = 1000
KIND_LENGTH = 120  # kinds are compared by this many leading characters


def show_log() -> None:
    """Print the log to stderr, with one line per request. Without this call, only warnings and errors are printed."""
    log.setLevel(logging.INFO)
    log.addHandler(logging.StreamHandler())


class LoggedOnce:
    """Logs each kind of warning only once.

    Warnings whose sentences differ only in numbers are of the same kind, unless the caller names a kind.
    """

    def __init__(self) -> None:
        """Start with nothing logged."""
        self._logged_kinds: set[str] = set()

    def warn(self, sentence: str, kind: str | None = None) -> None:
        """Log a sentence unless one of the same kind has been logged. `kind` defaults to the sentence."""
        kind_text = sentence if kind is None else kind
        without_numbers = re.sub(r"\d+", "0", kind_text)
        short_kind = without_numbers[:KIND_LENGTH]
        is_new = short_kind not in self._logged_kinds
        if is_new and len(self._logged_kinds) < MAX_KINDS:
            self._logged_kinds.add(short_kind)
            log.warning("%s", sentence)
