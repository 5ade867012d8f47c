"""Warnings that the log gets once."""

import re

from .api_error import log

MAX_KINDS = 1000  # kinds that are told apart; clients can make up any number
COMPARED = 120  # characters of a kind


class LoggedOnce:
    """Logs a warning of each kind once, as long as the server lives. Numbers, which every request has others of, make
    no other kind."""

    def __init__(self) -> None:
        self._kinds: set[str] = set()

    def warn(self, sentence: str, kind: str | None = None) -> None:
        """Log a sentence, unless there was one of its kind, which by default is the sentence itself."""
        kind = re.sub(r"\d+", "0", sentence if kind is None else kind)[:COMPARED]
        if kind not in self._kinds and len(self._kinds) < MAX_KINDS:
            self._kinds.add(kind)
            log.warning("%s", sentence)
