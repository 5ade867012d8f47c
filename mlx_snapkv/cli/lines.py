"""What a user types: with editing and history on a terminal, line by line from a file."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

from ..errors import SnapKVError
from .loading import require_text

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

PROMPT = "> "


class Lines:
    """Messages, until the end of the input. A line that ends with a backslash goes on with the next one.

    Args:
        stream: standard input; pasted text comes in as one message if it is a terminal.
    """

    def __init__(self, stream: TextIO | None):
        if stream is None:
            raise SnapKVError("standard input is closed, so there is nothing to chat about")
        self.interactive = stream.isatty()
        self._stream = stream
        # Prompts are no part of the answers, so they don't go to stdout.
        self._session: PromptSession | None = None
        if not self.interactive and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8-sig", errors="surrogateescape")
        if self.interactive:
            from prompt_toolkit import PromptSession
            from prompt_toolkit.output import create_output

            self._session = PromptSession(output=create_output(always_prefer_tty=True))

    def __iter__(self) -> Iterator[str]:
        while True:
            parts = []
            try:
                parts.append(self._line(PROMPT))
                while parts[-1].endswith("\\"):
                    parts[-1] = parts[-1][:-1]
                    parts.append(self._line("  "))
            except KeyboardInterrupt:  # what was typed is given up
                continue
            except EOFError:
                if parts:
                    yield "\n".join(parts)
                return
            yield "\n".join(parts)

    def _line(self, prompt: str) -> str:
        if self._session is not None:
            return self._session.prompt(prompt)
        line = self._stream.readline()
        if not line:
            raise EOFError
        require_text(line, "standard input")
        return line.rstrip("\n")
