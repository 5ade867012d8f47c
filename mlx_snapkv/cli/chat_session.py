"""The state of a chat: its input, its conversation, and the output that messages and commands share."""

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
from ..planning.kv_limit import NO_KV_LIMIT
from ..planning.long_prompts import LongPrompts
from ..sparse.options import Sparse
from .options import SamplingOptions
from .progress import stderr_console
from .prompt_console import PromptConsole
from .prompts import require_text

SHORT_TURN = 2048  # tokens; up to here no line says how much a turn writes to files


class Lines:
    """Iterates over the messages that the user types, until the end of the input.

    Pasted text is one message, and a backslash at the end of a line joins it with the next. Every rank reads its own
    standard input, since `mlx.launch` passes the same input to all.

    Args:
        stream: standard input; None if it is closed, which is an error.
        completer: completes words at a terminal, with Tab.

    Attributes:
        interactive: whether the input is a terminal.
    """

    def __init__(self, stream: TextIO | None, completer: Completer | None = None):
        """Prepare a terminal for editing, and any other input for UTF-8. Raises: SnapKVError: it is closed."""
        if stream is None:
            raise SnapKVError("standard input is closed, so no message can be read")
        self._stream = stream
        self.interactive = stream.isatty()
        self._session: PromptSession | None = None
        if self.interactive and not is_dumb_terminal():
            self._session = PromptSession(
                # Prompts go to the terminal and not to stdout, which has only answers.
                output=create_output(always_prefer_tty=True),
                completer=completer,
                complete_style=CompleteStyle.READLINE_LIKE,
            )
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8-sig", errors="surrogateescape")

    def __iter__(self) -> Iterator[str]:
        """Yield messages until the end of the input."""
        while (message := self._read_message()) is not None:
            yield message

    def _read_message(self) -> str | None:
        """Return the next message; None at the end of the input."""
        while True:
            parts = []
            try:
                parts.append(self._read_line("> "))
                while parts[-1].endswith("\\"):
                    parts[-1] = parts[-1].removesuffix("\\")
                    parts.append(self._read_line("  "))
            except KeyboardInterrupt:  # drops the typed text
                has_typed = self._session is not None and self._session.default_buffer.text != ""
                if not parts and not has_typed:
                    print("Ctrl-D or /quit leaves the chat", file=sys.stderr)
                continue
            except EOFError:
                if not parts:
                    return None
                # The input ended after a backslash: the lines before it are the message.
            return "\n".join(parts)

    def confirm(self, question: str) -> bool:
        """Ask the user a question, and return whether the answer is yes."""
        question = f"{question} [y/N] "
        try:
            if self._session is None:
                answer = self._read_line(question)
            else:  # a new session, since the history of messages must not have the answer
                answer = PromptSession(output=self._session.output).prompt(question)
        except (KeyboardInterrupt, EOFError):
            return False
        return answer.strip().lower() in ("y", "yes")

    def _read_line(self, prompt: str) -> str:
        """Show a prompt at a terminal, and return the next line. Raises: EOFError: the input has ended."""
        if self._session is not None:
            return self._session.prompt(prompt)
        if self.interactive:
            print(prompt, end="", file=sys.stderr, flush=True)
        line = self._stream.readline()
        if not line:
            raise EOFError
        return require_text(line, "standard input").rstrip("\n")


@dataclass
class Session:
    """A conversation with a user or a script. Answers go to stdout, and everything else goes to stderr.

    Attributes:
        model: the model's name, as the user typed it.
        sampling: the sampling options, which /set changes.
        console: prints progress and warnings, unless the chat is quiet.
        context: the command's context.
        options: the policy and the `RequestOptions` of new conversations, as keywords of `Conversation`.
        max_kv_bytes: limit of KV memory; see `LongPrompts.require_memory`.
        names: the file name of each attached document, by the document's text.
        exported: the files that /export has written.
        speed: the speed of the last turn, as text.
    """

    model: str
    conversation: Conversation
    sampling: SamplingOptions
    lines: Lines
    console: PromptConsole
    context: Context
    options: dict[str, Any]
    max_kv_bytes: int | None = None
    names: dict[str, str] = field(default_factory=dict)
    exported: set[Path] = field(default_factory=set)
    speed: str = ""

    def __post_init__(self) -> None:
        """Start with nothing saved and no warning printed."""
        self._stderr = stderr_console()
        self._saved: list[dict[str, str]] = []  # messages of the conversation's file
        self._warned: Any = None  # the policy whose warnings were printed last

    def say(self, text: str) -> None:
        """Print a line on stderr, even if the chat is quiet."""
        self._stderr.print(text, markup=False, soft_wrap=True)

    def attach(self, text: str) -> int:
        """Attach a document to the next message, and return its number of tokens."""
        conversation = self.conversation
        # The thread only counts: after Ctrl-C it runs on, and must not attach the document then.
        n_tokens = self.console.wait_for(partial(conversation.count, text))
        conversation.attached.append(text)
        n_before = len(conversation.read)
        # A document that does not fit is refused with its message.
        self.console.announce(
            conversation.model, n_tokens, n_before, max_kv_bytes=NO_KV_LIMIT, **self._keywords
        )
        return n_tokens

    @property
    def _keywords(self) -> dict[str, Any]:
        """The keywords of `generate_step` for the next turn."""
        conversation = self.conversation
        if conversation.policy is None:
            return conversation.generation
        return {"policy": conversation.policy, **conversation.options, **conversation.generation}

    def _require_memory(self, n_new: int) -> None:
        """Raise SnapKVError if a turn of `n_new` tokens will not fit in memory."""
        conversation = self.conversation
        prompts = LongPrompts(conversation.model, **self._keywords)
        prompts.require_memory(n_new, len(conversation.read), self.max_kv_bytes)

    def answer(self, text: str) -> None:
        """Send a message, and print the answer as it comes."""
        conversation = self.conversation
        last = None  # the last response, with the speeds
        with self.console.bar(self._cost, self._require_memory) as update:
            responses: Any = self.console.wait_for(partial(conversation.send, text, update))
            try:
                for last in responses:
                    print(last.text, end="", flush=True)
            finally:
                responses.close()  # ends an interrupted turn now, not when Python collects the generator
                if last is not None:
                    print(flush=True)
                    self.speed = f"prompt {last.prompt_tps:.1f} tokens/s, generation {last.generation_tps:.1f} tokens/s"
        report = conversation.report
        if report is not None and report.warnings and self._warned != conversation.policy:
            self.console.say_warnings(report)
            self._warned = conversation.policy

    @property
    def settings(self) -> str:
        """Return the policy and the options of the conversation, as text."""
        conversation = self.conversation
        values = {"policy": conversation.policy or "none", **conversation.options}
        return ", ".join(f"{name} {value}" for name, value in values.items() if value)

    @property
    def waiting(self) -> str:
        """Return the words about attached documents that the model has not read; empty without one."""
        n = len(self.conversation.attached)
        if n == 0:
            return ""
        documents = "the document" if n == 1 else f"the {n} documents"
        return f", and {documents} will be read with your next message"

    def name_of(self, document: str) -> str:
        """Return the file name of a document, or the beginning of its text if it is from a saved conversation."""
        if self.names.get(document):
            return self.names[document]
        beginning = " ".join(document[:200].split())
        if len(beginning) > 40:
            beginning = beginning[:39] + "…"
        return f"“{beginning}”"

    def may_replace(self) -> bool:
        """Return whether the conversation may be lost: it is saved, or the user agrees. A script always agrees.

        The user is asked if the conversation is not saved, and gets a line if it continues.
        """
        is_saved = not self.conversation.said or self.conversation.messages == self._saved
        if is_saved or not self.lines.interactive:
            return True
        is_agreed = self.lines.confirm("This conversation is not saved: replace it?")
        if not is_agreed:
            self.say("the conversation continues")
        return is_agreed

    def replace(self, conversation: Conversation) -> None:
        """Continue with a conversation that is saved or new, so that it may be lost until the next turn."""
        self.conversation = conversation
        self._saved = conversation.messages

    def start_again(self, line: str, **changes: Any) -> None:
        """Start a new conversation, if the current one may be lost, and print `line`.

        Options that a loaded file has set are dropped.

        Args:
            **changes: new values of the keywords `system`, `policy` and those of `RequestOptions`. With changes,
                attached documents stay attached.
            line: the line to print.
        """
        if not self.may_replace():
            return
        conversation = self.conversation
        self.options |= {name: changes[name] for name in self.options if name in changes}
        options = {"system": conversation.system, **self.options, **changes}
        if not isinstance(options["policy"], Sparse):
            options["store"] = None  # only sparse attention has a store
        options |= conversation.generation
        self.replace(Conversation(conversation.model, conversation.tokenizer, **options))
        if changes:
            self.conversation.attached = conversation.attached
        self.say(line + self.waiting)

    def as_markdown(self) -> str:
        """Return the conversation as Markdown, with the names of its documents instead of their text."""
        titles = {"system": "System prompt", "user": "Question", "assistant": "Answer"}
        turns = iter(self.conversation.said)
        parts = [f"# Chat with {self.model}", self.settings]
        for message in self.conversation.messages:
            role = message["role"]
            text = message["content"]
            parts.append(f"## {titles[role]}")
            if role == "user":
                *documents, text = next(turns)
                parts += [f"*File: {self.name_of(document)}*" for document in documents]
            parts.append(text.strip())
        return "\n\n".join(parts) + "\n"

    def _cost(self, n_new: int) -> FileCost | None:
        """Return the bytes that a turn will write to files; None for a short turn, or a store that is not in files."""
        conversation = self.conversation
        if n_new <= SHORT_TURN:
            return None
        return file_cost(
            conversation.model, conversation.store, n_new, folder=conversation.options["store_dir"]
        )
