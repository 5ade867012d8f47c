"""A chat under way: what a user types, and what the loop and the commands share."""

import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import Completer
from prompt_toolkit.output import create_output
from prompt_toolkit.shortcuts import CompleteStyle
from prompt_toolkit.utils import is_dumb_terminal
from typer import Context

from ..chat.conversation import Conversation
from ..errors import SnapKVError
from ..planning.file_cost import FileCost, file_cost
from ..sparse.options import Sparse
from .options import SamplingOptions
from .progress import stderr_console
from .prompts import require_text
from .reading import Reading

SHORT_TURN = 2048  # tokens; what shorter turns write to files is not worth a line


class Lines:
    """Messages, until the end of the input: pasted text is one, and a backslash joins lines.

    `mlx.launch` passes the same input to several Macs, so each reads its own.
    """

    def __init__(self, stream: TextIO | None, completer: Completer | None = None):
        if stream is None:
            raise SnapKVError("standard input is closed, so no message can be read")
        self._stream, self.interactive = stream, stream.isatty()
        self._session: PromptSession | None = None
        if self.interactive and not is_dumb_terminal():
            # Prompts are no part of the answers, so they don't go to stdout.
            output, style = create_output(always_prefer_tty=True), CompleteStyle.READLINE_LIKE
            self._session = PromptSession(output=output, completer=completer, complete_style=style)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8-sig", errors="surrogateescape")

    def __iter__(self) -> Iterator[str]:
        while (message := self._message()) is not None:
            yield message

    def _message(self) -> str | None:
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

    def agree(self, question: str) -> bool:
        """Ask a question; return whether the user has typed yes."""
        question = f"{question} [y/N] "
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
        if self.interactive:
            print(prompt, end="", file=sys.stderr, flush=True)
        if not (line := self._stream.readline()):
            raise EOFError
        return require_text(line, "standard input").rstrip("\n")


@dataclass
class Session:
    """A conversation and the terminal or script that it is with. Answers go to stdout, all else to stderr."""

    model: str  # its name, as the user gave it
    conversation: Conversation
    sampling: SamplingOptions
    lines: Lines
    reading: Reading  # quiet if the chat is
    context: Context  # the command's
    options: dict[
        str, Any
    ]  # of a new conversation: its policy and `RequestOptions`, as they were given
    names: dict[str, str] = field(default_factory=dict)  # of attached documents, by their text
    exported: set[Path] = field(default_factory=set)  # files that hold this chat already
    speed: str = ""  # of the last turn, in words

    def __post_init__(self) -> None:
        self._console = stderr_console()
        self._in_file: list[dict[str, str]] = []  # the messages that are in a file
        self._warned: Any = None  # of which policy a warning has been said

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def attach(self, text: str) -> int:
        """Attach a document; the number of its tokens."""
        now = self.conversation
        # Not `now.attach`: after Ctrl-C the thread goes on, and would attach it all the same.
        n_tokens = self.reading.wait_for(partial(now.count, text))
        now.attached.append(text)
        has_policy = now.policy is not None  # otherwise the rest does nothing
        settings = {"policy": now.policy, **now.options} if has_policy else {}
        self.reading.warn(now.model, n_tokens, len(now.read), **settings, **now.generation)
        return n_tokens

    def answer(self, text: str) -> None:
        """Send a message, and print the answer as it comes."""
        last, now = None, self.conversation
        with self.reading.bar(self._cost) as update:
            responses: Any = self.reading.wait_for(partial(now.send, text, update))
            try:
                for last in responses:
                    print(last.text, end="", flush=True)
            finally:
                responses.close()  # now, and not when it is collected: it may have been interrupted
                if last is not None:
                    print(flush=True)
                    self.speed = f"prompt {last.prompt_tps:.1f} tokens/s, generation {last.generation_tps:.1f} tokens/s"
        if now.report is not None and now.report.warnings and self._warned != now.policy:
            self.reading.say_warnings(now.report)
            self._warned = now.policy

    @property
    def settings(self) -> str:
        now = self.conversation
        values = {"policy": now.policy or "none", **now.options}
        return ", ".join(f"{name} {value}" for name, value in values.items() if value)

    @property
    def waiting(self) -> str:
        """What was attached and is still to be read."""
        n = len(self.conversation.attached)
        them = "the document" if n == 1 else f"the {n} documents"
        return f", and {them} will be read with your next message" if n else ""

    def name_of(self, document: str) -> str:
        """The name of a document's file; how it begins if a saved conversation brought it."""
        start = " ".join(document[:200].split())
        return self.names.get(document) or f"“{start if len(start) <= 40 else start[:39] + '…'}”"

    def may_replace(self) -> bool:
        """Whether the conversation may be lost: it is in a file, or the user at the terminal agrees."""
        kept = not self.conversation.said or self.conversation.messages == self._in_file
        if kept or not self.lines.interactive:
            return True
        if not (agreed := self.lines.agree("This conversation is not saved: replace it?")):
            self.say("the conversation continues")
        return agreed

    def replace(self, conversation: Conversation) -> None:
        """Go on with this one, which is in a file or new."""
        self.conversation, self._in_file = conversation, conversation.messages

    def start_again(self, line: str, **changes: Any) -> None:
        """Forget the conversation, and what the file it came from may have brought with it, if it may be lost.

        With other settings, what is attached still waits.
        """
        if not self.may_replace():
            return
        now = self.conversation
        self.options |= {name: changes[name] for name in self.options if name in changes}
        options = {"system": now.system, **self.options, **changes}
        if not isinstance(options["policy"], Sparse):
            options["store"] = None
        self.replace(Conversation(now.model, now.tokenizer, **options, **now.generation))
        if changes:
            self.conversation.attached = now.attached
        self.say(line + self.waiting)

    def as_markdown(self) -> str:
        """The conversation, with the names of its documents in place of their text."""
        titles = {"system": "System prompt", "user": "Question", "assistant": "Answer"}
        turns = iter(self.conversation.said)
        parts = [f"# Chat with {self.model}", self.settings]
        for message in self.conversation.messages:
            role, content = message["role"], message["content"]
            parts.append(f"## {titles[role]}")
            if role == "user":
                *documents, content = next(turns)
                parts += [f"*File: {self.name_of(text)}*" for text in documents]
            parts.append(content.strip())
        return "\n\n".join(parts) + "\n"

    def _cost(self, n_new: int) -> FileCost | None:
        """What a turn with a document will write to files."""
        now = self.conversation
        if n_new <= SHORT_TURN:
            return None
        return file_cost(now.model, now.store, n_new, folder=now.options["store_dir"])
