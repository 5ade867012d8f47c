"""Slash commands for `mlx-snapkv chat`."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from prompt_toolkit.completion import Completer, PathCompleter, WordCompleter
from prompt_toolkit.document import Document

from ..caches.layers import file_bytes, kv_bytes
from ..chat.conversation import Conversation
from ..compress.policy import POLICIES
from ..errors import OptionError, SnapKVError, UnknownOptionError, suggestion
from ..models.distributed import from_first_rank, n_ranks
from ..paths import path_of, put, refusing, require_place
from ..planning.auto import CONVERSATION
from ..planning.settings import AUTO, Setting, setting_named
from ..planning.units import format_bytes
from ..saved import require_writable
from ..sparse.options import Sparse
from .chat_session import Session
from .command import values_in_sparse
from .loading import WITHOUT_LAUNCH
from .options import SamplingOptions
from .prompts import read_file

FILE = "FILE"
Handler = Callable[[Session, str], None]


class Command(NamedTuple):
    """A slash command. Its handler's docstring is its help text.

    Attributes:
        synopsis: the arguments, as shown in the help.
        completer: completer for the arguments.
        handler: function that runs the command, called with the session and the argument text.
    """

    synopsis: str
    completer: Completer
    handler: Handler


CHAT_COMMANDS: dict[str, Command] = {}


def _command(synopsis: str = "", *completions: str) -> Callable[[Handler], Handler]:
    """Return a decorator that registers a slash command. A function named `_files` becomes /files.

    Args:
        synopsis: the arguments, as shown in the help; `FILE` means a file name.
        *completions: completions for arguments that are not file names.
    """
    takes_file = synopsis == FILE
    completer: Completer = (
        PathCompleter(expanduser=True) if takes_file else WordCompleter([*completions])
    )

    def register(handler: Handler) -> Handler:
        name = handler.__name__.replace("_", "/")
        CHAT_COMMANDS[name] = Command(synopsis, completer, handler)
        return handler

    return register


def run_command(session: Session, message: str) -> None:
    """Run the command in a message that starts with a slash.

    Raises:
        SnapKVError: the command does not exist, or it fails.
        StopIteration: the command ends the chat.
    """
    name, _, arguments = message.partition(" ")
    if name not in CHAT_COMMANDS:
        raise UnknownOptionError(
            f"unknown command {name}{suggestion(name, CHAT_COMMANDS)}: try /help"
        )
    command = CHAT_COMMANDS[name]
    arguments = arguments.strip()
    if arguments and not command.synopsis:
        raise SnapKVError(f"{name} takes no arguments, got {arguments!r}")
    if command.synopsis == FILE:
        arguments = _strip_quotes(arguments)
        if not arguments:
            raise SnapKVError(f"{name} needs a file name")
    command.handler(session, arguments)


def _strip_quotes(text: str) -> str:
    """Remove quotation marks around a file name."""
    return re.sub(r"""^(["'])(.*)\1$""", r"\2", text)


class CommandCompleter(Completer):
    """Completes command names and arguments."""

    def get_completions(self, document, complete_event) -> Iterator:
        """Complete the command name, or the arguments after it."""
        name, space, arguments = document.text_before_cursor.partition(" ")
        if not space and name.startswith("/"):
            names = WordCompleter(list(CHAT_COMMANDS), WORD=True)
            yield from names.get_completions(Document(name), complete_event)
        elif name in CHAT_COMMANDS:
            completer = CHAT_COMMANDS[name].completer
            yield from completer.get_completions(Document(arguments), complete_event)


@_command(FILE)
def _file(session: Session, path: str) -> None:
    """Attach a document to the next message."""
    text = from_first_rank(partial(read_file, "/file", path))
    n_tokens = session.attach(text)
    file_name = Path(path).name
    session.file_names[text] = file_name
    session.say(f"{file_name}: {n_tokens:,} tokens, will be read with your next message")


@_command("[detach N]", "detach")
def _files(session: Session, arguments: str) -> None:
    """List the attached files, or detach one that has not been read."""
    if arguments:
        _detach(session, arguments)
        return
    lines = []
    for *documents, _typed_text in session.conversation.user_inputs:
        lines += [f"   {session.name_of(text)}, part of the conversation" for text in documents]
    for number, text in enumerate(session.conversation.attached, start=1):
        lines.append(f"{number}  {session.name_of(text)}, will be read with your next message")
    session.say("\n".join(lines) or "no file is attached: /file FILE attaches one")


def _detach(session: Session, arguments: str) -> None:
    """Handle "/files detach N", where N is the number or name of an attached file.

    If several files have the same name, the first one is detached.

    Raises: SnapKVError: the arguments do not start with "detach", or no unread file matches.
    """
    action, _, number_or_name = arguments.partition(" ")
    if action != "detach":
        raise SnapKVError(
            f"/files takes no arguments, or detach and a file's number or name, got {arguments!r}"
        )
    attached = session.conversation.attached
    for number, text in enumerate(attached, start=1):
        name = session.name_of(text)
        if number_or_name.strip() in (str(number), name):
            del attached[number - 1]
            session.say(f"detached {name}")
            return
    raise SnapKVError(
        f"/files detach needs the number or name of a file that has not been read, got {number_or_name!r}: see /files"
    )


@_command()
def _undo(session: Session, _: str) -> None:
    """Undo the last turn."""
    conversation = session.conversation
    typed_text = conversation.undo()
    must_reread = bool(conversation.user_inputs) and not conversation.read
    note = "; your next message will read the conversation again" if must_reread else ""
    beginning = " ".join(typed_text.split())[:60]
    session.say(f"undid the turn: {beginning}{note}{session.unread_files_clause}")


@_command()
def _retry(session: Session, _: str) -> None:
    """Answer the last question again."""
    if not session.conversation.user_inputs:
        raise SnapKVError("the conversation is empty, so there is no question to answer again")
    is_same = _answer_again(session)
    if is_same and session.sampling.temp == 0:
        session.say("the answer is the same, since temp is 0: with /set temp 0.7 it can differ")


def _answer_again(session: Session) -> bool:
    """Undo the last turn and answer its message again. Return whether the answer is the same."""
    conversation = session.conversation
    n_turns = len(conversation.user_inputs)
    last_answer = conversation.messages[-1:]
    typed_text = conversation.undo()
    try:
        session.answer(typed_text)
    finally:
        is_unanswered = len(conversation.user_inputs) < n_turns
        if is_unanswered:
            session.say("the question was not answered again, and its turn is undone")
    return conversation.messages[-1:] == last_answer


@_command()
def _compare(session: Session, _: str) -> None:
    """Answer the last question again, reading all entries, and say whether the answer differs."""
    conversation = session.conversation
    if conversation.report is None or not conversation.report.compressed:
        raise SnapKVError("the full cache gave the last answer: there is nothing to compare")
    if not isinstance(conversation.policy, Sparse):
        raise SnapKVError("the evicted entries are gone: chat with --sparse")
    policy = conversation.policy
    try:
        # Only the last turn is read again with full attention. The entries of earlier turns are reused as they are.
        conversation.policy = Sparse(budget="100%")
        is_same = _answer_again(session)
    finally:
        conversation.policy = policy
    result = "the same answer" if is_same else "a different answer, which replaces the first"
    if not is_same and session.sampling.temp > 0:
        result += f". Answers sampled with temp {session.sampling.temp:g} may always differ: /set temp 0 compares"
    session.say(f"from all entries: {result}")


@_command("[NAME VALUE]", *vars(SamplingOptions()))
def _set(session: Session, arguments: str) -> None:
    """Show or change the sampling options."""
    name, _, value = arguments.partition(" ")
    if name:
        conversation = session.conversation
        sampling = session.sampling.with_option(name, value.strip(), session.context)
        try:
            keywords = sampling.generate_keywords(conversation.tokenizer)
        except OptionError as error:
            raise SnapKVError(f"/set {error}") from error
        session.sampling = sampling
        conversation.generation.update(keywords)
    options = vars(session.sampling)
    session.say(", ".join(f"{option} {number:g}" for option, number in options.items()))


@_command()
def _stats(session: Session, _: str) -> None:
    """Show the last turn's entries, memory and speed."""
    conversation = session.conversation
    report = conversation.report
    if report is None:
        session.say("there is no turn yet, or none since the conversation was loaded")
        return
    session.say(str(report))
    caches = conversation.prompt_cache
    sizes = [f"{format_bytes(kv_bytes(caches))} in memory"]
    n_file_bytes = file_bytes(caches)
    if n_file_bytes:
        sizes.append(f"{format_bytes(n_file_bytes)} in files")
    n_undo_bytes = conversation.undo_nbytes
    if n_undo_bytes:
        sizes.append(f"{format_bytes(n_undo_bytes)} in memory for /undo")
    session.say(f"held between turns: {', '.join(sizes)}\nspeed: {session.speed}")


@_command(FILE)
def _save(session: Session, name: str) -> None:
    """Save the conversation to a .safetensors file."""
    path = require_writable(name)
    note = ", replacing the earlier file" if path.exists() else ""
    session.conversation.save(path)
    session.mark_as_saved()
    session.say(f"saved in {path}{note}")


@_command(FILE)
def _load(session: Session, path: str) -> None:
    """Continue from a saved conversation or text."""
    if not session.confirm_replacing():
        return
    current = session.conversation
    loaded = Conversation.load(
        path, current.model, current.tokenizer, policy=session.policy, **current.generation
    )
    session.switch_to(loaded)
    note = "" if loaded.policy == session.policy else ", as it was saved"
    session.say(f"{len(loaded.read):,} tokens loaded, {session.setting_text}{note}")


@_command(FILE)
def _export(session: Session, name: str) -> None:
    """Write the conversation as Markdown."""
    if n_ranks() > 1:
        raise SnapKVError(f"/export does not run on several Macs: {WITHOUT_LAUNCH}")
    path = path_of(name, "/export")
    with refusing(f"/export {path}"):
        file_exists = require_place(path)
        is_earlier_export = path.absolute() in session.exported
        if file_exists and not is_earlier_export:
            if not session.reader.is_terminal:
                raise SnapKVError(f"/export {path}: the file exists, give another name")
            if not session.reader.confirm(f"{path} exists: replace it?"):
                session.say("nothing was written")
                return
        put(path, session.as_markdown())
    session.exported.add(path.absolute())
    session.say(f"written to {path}")


@_command()
def _reset(session: Session, _: str) -> None:
    """Start a new conversation."""
    session.start_new_conversation("started a new conversation")


@_command("[POLICY]", "none", AUTO, Sparse.name, *POLICIES)
def _policy(session: Session, text: str) -> None:
    """Start a new conversation with this policy, or sparse:OPTIONS; none is the full cache."""
    conversation = session.conversation
    if not text:
        session.say(f"policy: {conversation.policy or 'none'}")
        return
    policy: Setting | None = None
    if text == AUTO:
        auto = replace(session.compression, policy=AUTO, snapkv=None, sparse=None)
        policy = auto.setting_for_task(
            conversation.model,
            CONVERSATION,
            session.say,
            conversation.generation,
            session.sampling.max_tokens,
        )
    elif text != "none":
        compression = session.compression
        _, _, options = text.partition(":")
        if values_in_sparse(options, "store"):
            # `text` names a store, so ignore --store. Otherwise, --store would replace store=memory, because
            # `fill_defaults_of` does not distinguish it from an unset store.
            compression = replace(compression, store=None)
        policy = compression.fill_defaults_of(setting_named(text))
    session.start_new_conversation(
        f"started a new conversation with policy {policy or 'none'}", policy=policy
    )


@_command("[TEXT]")
def _system(session: Session, text: str) -> None:
    """Start a new conversation with this system prompt, or without one."""
    words = "with that system prompt" if text else "without a system prompt"
    session.start_new_conversation(f"started a new conversation {words}", system=text or None)


@_command()
def _help(session: Session, _: str) -> None:
    """Show this list."""
    for name, command in CHAT_COMMANDS.items():
        usage = f"{name} {command.synopsis}"
        session.say(f"{usage:24} {command.handler.__doc__}")


@_command()
def _quit(session: Session, _: str) -> None:
    """Leave the chat (also Ctrl-D)."""
    raise StopIteration
