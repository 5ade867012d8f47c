"""What a user types: with editing and history on a terminal, line by line from a file."""

import io
import sys
from collections.abc import Iterator
from functools import cached_property, partial
from typing import TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import Completer
from prompt_toolkit.output import create_output
from prompt_toolkit.shortcuts import CompleteStyle
from prompt_toolkit.utils import is_dumb_terminal

from ..errors import SnapKVError
from ..several.ranks import here
from .prompts import require_text
from .sharded import on_first


class Lines:
    """Messages, until the end of the input. A line that ends with a backslash goes on with the next one.

    Several Macs all take rank 0's.

    Args:
        stream: standard input; pasted text comes in as one message if it is a terminal.
        completer: what Tab completes there.
    """

    def __init__(self, stream: TextIO | None, completer: Completer | None = None):
        if stream is None:
            raise SnapKVError("standard input is closed, so there is nothing to chat about")
        self._on_terminal = stream.isatty()
        self._stream = stream
        self._session: PromptSession | None = None
        if self._on_terminal and not is_dumb_terminal():
            # Prompts are no part of the answers, so they don't go to stdout.
            self._session = PromptSession(
                output=create_output(always_prefer_tty=True),
                completer=completer,
                complete_style=CompleteStyle.READLINE_LIKE,
            )
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8-sig", errors="surrogateescape")

    @cached_property
    def interactive(self) -> bool:
        """Whether a user types them. All Macs ask at the same place."""
        return here().first(self._on_terminal)

    def __iter__(self) -> Iterator[str]:
        while (message := on_first(self._message)) is not None:
            yield message

    def agree(self, question: str) -> bool:
        """Whether the user at the terminal says yes."""
        return on_first(partial(self._agree, f"{question} [y/N] "))

    def _message(self) -> str | None:
        """The next message; None at the end."""
        while True:
            parts = []
            try:
                parts.append(self._line("> "))
                while parts[-1].endswith("\\"):
                    parts[-1] = parts[-1][:-1]
                    parts.append(self._line("  "))
            except KeyboardInterrupt:  # what was typed is dropped
                if not parts and not (self._session and self._session.default_buffer.text):
                    print("Ctrl-D or /quit leaves the chat", file=sys.stderr)
                continue
            except EOFError:
                if not parts:
                    return None
            return "\n".join(parts)

    def _agree(self, question: str) -> bool:
        try:
            if self._session is None:
                answer = self._line(question)
            else:  # in a session of its own: answers are no messages to go back to
                answer = PromptSession(output=self._session.output).prompt(question)
        except (KeyboardInterrupt, EOFError):
            return False
        return answer.strip().lower() in ("y", "yes")

    def _line(self, prompt: str) -> str:
        if self._session is not None:
            return self._session.prompt(prompt)
        if self._on_terminal:
            print(prompt, end="", file=sys.stderr, flush=True)
        line = self._stream.readline()
        if not line:
            raise EOFError
        require_text(line, "standard input")
        return line.rstrip("\n")
