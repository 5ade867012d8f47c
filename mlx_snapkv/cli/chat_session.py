"""State of a chat: input lines, conversation and output."""

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
from ..planning.settings import Setting
from .cache_options import CompressionOptions
from .options import SamplingOptions
from .prompt_console import PromptConsole
from .prompts import require_text

# Longest turn, in tokens, that counts as short. The disk space that a short turn takes is not announced.
MAX_SHORT_TURN = 2048


class MessageReader:
    """Iterable over the messages on standard input.

    Each line is a message. Text pasted into a terminal is one message, even if it has several lines. A backslash at the
    end of a line continues the message on the next line. With several Macs, every rank reads its own standard input,
    because `mlx.launch` passes the same input to all.

    Args:
        stream: standard input. None if it is closed, which is an error.
        completer: completes words with Tab in a terminal.

    Attributes:
        is_terminal: whether the input is a terminal.
    """

    def __init__(self, stream: TextIO | None, completer: Completer):
        """Set up line editing if the input is a terminal, and decode other input as UTF-8.

        Raises: SnapKVError: the input is closed.
        """
        if stream is None:
            raise SnapKVError("standard input is closed, so no message can be read")
        self._stream = stream
        self.is_terminal = stream.isatty()
        self._prompt_session: PromptSession | None = None  # for line editing
        if self.is_terminal and not is_dumb_terminal():
            self._prompt_session = PromptSession(
                # Write prompts to the terminal, because stdout is only for answers.
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
        """Return the next message, or None at the end of the input."""
        while True:
            lines: list[str] = []
            try:
                lines.append(self._read_line("> "))
                while lines[-1].endswith("\\"):
                    lines[-1] = lines[-1].removesuffix("\\")
                    lines.append(self._read_line("  "))
            except KeyboardInterrupt:  # discards the typed text
                if not lines and not self._text_on_current_line:
                    print("Ctrl-D or /quit leaves the chat", file=sys.stderr)
                continue
            except EOFError:
                if not lines:
                    return None
                # The input ended after a backslash, so return the lines read so far.
            return "\n".join(lines)

    @property
    def _text_on_current_line(self) -> str:
        """Return the text typed on the current line, or an empty string without line editing."""
        return "" if self._prompt_session is None else self._prompt_session.default_buffer.text

    def confirm(self, question: str) -> bool:
        """Ask the user a yes/no question. Return True for yes."""
        prompt = f"{question} [y/N] "
        try:
            if self._prompt_session is None:
                answer = self._read_line(prompt)
            else:  # a separate session keeps the reply out of the message history
                answer = PromptSession(output=self._prompt_session.output).prompt(prompt)
        except (KeyboardInterrupt, EOFError):
            return False
        return answer.strip().lower() in ("y", "yes")

    def _read_line(self, prompt: str) -> str:
        """Show a prompt in a terminal and return the next line.

        Raises:
            EOFError: the input has ended.
            SnapKVError: the line is not UTF-8 text.
        """
        if self._prompt_session is not None:
            return self._prompt_session.prompt(prompt)
        if self.is_terminal:
            print(prompt, end="", file=sys.stderr, flush=True)
        line = self._stream.readline()
        if not line:
            raise EOFError
        return require_text(line, "standard input").rstrip("\n")


@dataclass
class Session:
    """A conversation with a user or a script. Answers go to stdout, everything else to stderr.

    Attributes:
        model_name: model name as typed by the user.
        sampling: sampling options, changed by /set.
        console: prints progress and warnings unless the chat is quiet.
        context: typer's context for the chat command.
        policy: setting for new conversations.
        compression: compression options from the command line.
        max_kv_bytes: KV memory limit in bytes; see `LongPrompts.require_memory`.
        file_names: file names of attached documents, keyed by their text.
        exported: files written by /export.
        speed: speed of the last turn, as text.
    """

    model_name: str
    conversation: Conversation
    sampling: SamplingOptions
    reader: MessageReader
    console: PromptConsole
    context: Context
    policy: Setting | None
    compression: CompressionOptions
    max_kv_bytes: int | None
    file_names: dict[str, str] = field(default_factory=dict)
    exported: set[Path] = field(default_factory=set)
    speed: str = ""

    def __post_init__(self) -> None:
        """Initialise the private state."""
        self._stderr = PromptConsole()
        # The conversation's messages when it was last saved.
        self._saved_messages: list[dict[str, str]] = []
        self._policy_warned_about: Any = None  # the policy whose warnings were printed last

    def say(self, text: str) -> None:
        """Print a line to stderr, even if the chat is quiet."""
        self._stderr.say(text)

    def attach(self, text: str) -> int:
        """Attach a document to the next message and return its length in tokens."""
        conversation = self.conversation
        # Count the tokens in the thread that `wait_for` starts, but attach the document here. The thread keeps running
        # after Ctrl-C, and would attach a document that the user no longer wants.
        n_tokens = self.console.wait_for(partial(conversation.count, text))
        conversation.attached.append(text)
        n_read_before = len(conversation.read)
        # No limit here: a document that does not fit is rejected when its message is sent.
        self.console.announce(
            conversation.model,
            n_tokens,
            n_read_before,
            max_kv_bytes=NO_KV_LIMIT,
            **self._generate_keywords,
        )
        return n_tokens

    @property
    def _generate_keywords(self) -> dict[str, Any]:
        """Return the keyword arguments of `generate_step` for the next turn."""
        conversation = self.conversation
        return {"policy": conversation.policy, **conversation.generation}

    def _require_memory(self, n_new_tokens: int) -> None:
        """Check that a turn of `n_new_tokens` fits in memory. Raises: SnapKVError: it doesn't."""
        conversation = self.conversation
        prompts = LongPrompts(conversation.model, **self._generate_keywords)
        prompts.require_memory(n_new_tokens, len(conversation.read), self.max_kv_bytes)

    def answer(self, text: str) -> None:
        """Send a message and stream the answer to stdout."""
        conversation = self.conversation
        last_response = None  # contains the speeds
        with self.console.bar(self._predict_file_cost, self._require_memory) as update_bar:
            responses: Any = self.console.wait_for(partial(conversation.send, text, update_bar))
            try:
                for response in responses:
                    last_response = response
                    print(response.text, end="", flush=True)
            finally:
                responses.close()  # ends an interrupted turn now, not when the generator is garbage-collected
                if last_response is not None:
                    print(flush=True)
                    self.speed = _speed_text(last_response)
        report = conversation.report
        is_new_policy = conversation.policy != self._policy_warned_about
        if report is not None and report.warnings and is_new_policy:
            self.console.say_warnings(report.warnings)
            self._policy_warned_about = conversation.policy

    @property
    def setting_text(self) -> str:
        """Describe the conversation's setting."""
        return f"policy {self.conversation.policy or 'none'}"

    @property
    def unread_files_clause(self) -> str:
        """Return a clause about attached documents that are waiting to be read, or an empty string."""
        n_unread = len(self.conversation.attached)
        if n_unread == 0:
            return ""
        documents = "the document" if n_unread == 1 else f"the {n_unread} documents"
        return f", and {documents} will be read with your next message"

    def name_of(self, document: str) -> str:
        """Return a document's file name, or the start of its text if it came from a saved conversation."""
        file_name = self.file_names.get(document)
        if file_name:
            return file_name
        beginning = " ".join(document[:200].split())
        if len(beginning) > 40:
            beginning = beginning[:39] + "…"
        return f"“{beginning}”"

    def confirm_replacing(self) -> bool:
        """Return whether the conversation may be discarded.

        In a terminal, the user is asked, unless the conversation is empty or saved. If the user declines, a message
        says that the conversation continues.
        """
        is_empty = not self.conversation.user_inputs
        is_saved = self.conversation.messages == self._saved_messages
        is_script = not self.reader.is_terminal
        if is_empty or is_saved or is_script:
            return True
        has_agreed = self.reader.confirm("This conversation is not saved: replace it?")
        if not has_agreed:
            self.say("the conversation continues")
        return has_agreed

    def switch_to(self, conversation: Conversation) -> None:
        """Switch to a saved or new conversation."""
        self.conversation = conversation
        self.mark_as_saved()

    def mark_as_saved(self) -> None:
        """Record that the conversation need not be saved until its next turn."""
        self._saved_messages = self.conversation.messages

    def start_new_conversation(self, message: str, **changes: Any) -> None:
        """Start a new conversation if the current one may be discarded, and print `message`.

        The new conversation uses the session's `policy`, even if the current conversation was loaded with another
        setting.

        Args:
            message: line to print.
            **changes: new values for `system` and `policy`. If either is given, attached documents stay attached.
        """
        if not self.confirm_replacing():
            return
        current = self.conversation
        self.policy = changes.get("policy", self.policy)
        new_conversation = Conversation(
            current.model,
            current.tokenizer,
            policy=self.policy,
            system=changes.get("system", current.system),
            **current.generation,
        )
        if changes:
            new_conversation.attached = current.attached
        self.switch_to(new_conversation)
        self.say(message + self.unread_files_clause)

    def as_markdown(self) -> str:
        """Return the conversation as Markdown, with file names in place of documents."""
        headings = {"system": "System prompt", "user": "Question", "assistant": "Answer"}
        user_inputs = iter(self.conversation.user_inputs)
        paragraphs = [f"# Chat with {self.model_name}", self.setting_text]
        for message in self.conversation.messages:
            role = message["role"]
            text = message["content"]
            paragraphs.append(f"## {headings[role]}")
            if role == "user":
                *documents, text = next(user_inputs)
                paragraphs += [f"*File: {self.name_of(document)}*" for document in documents]
            paragraphs.append(text.strip())
        return "\n\n".join(paragraphs) + "\n"

    def _predict_file_cost(self, n_new_tokens: int) -> FileCost | None:
        """Predict the disk space that a turn of `n_new_tokens` takes.

        Return None if the turn is short, no entries are written to files, or the free space is unknown.
        """
        is_short = n_new_tokens <= MAX_SHORT_TURN
        if is_short:
            return None
        return file_cost(self.conversation.model, self.conversation.policy, n_new_tokens)


def _speed_text(response: Any) -> str:
    """Describe the prompt and generation speeds of a turn, given mlx-lm's last response."""
    return (
        f"prompt {response.prompt_tps:.1f} tokens/s, "
        f"generation {response.generation_tps:.1f} tokens/s"
    )
