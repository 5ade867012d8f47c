"""The commands of a chat: lines that start with a slash."""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from prompt_toolkit.completion import Completer, PathCompleter, WordCompleter
from prompt_toolkit.document import Document

from ..caches.layers import file_bytes, kv_bytes
from ..chat.conversation import Conversation
from ..compress.policy import POLICIES
from ..errors import SnapKVError, UnknownOptionError, suggestion
from ..models.distributed import from_first, n_ranks
from ..paths import path_of, put, refusing, require_place
from ..planning.auto import CONVERSATION
from ..planning.config import CompressionConfig
from ..planning.settings import AUTO, setting_named
from ..planning.units import format_bytes
from ..saved import require_writable
from ..sparse.options import Sparse
from .cache_options import CompressionOptions, recommended_keywords
from .chat_session import Session
from .loading import WITHOUT_LAUNCH
from .options import SamplingOptions
from .prompts import read_file

FILE = "FILE"
Handler = Callable[[Session, str], None]


class Command(NamedTuple):
    """A command of the chat. The docstring of `do` is its help.

    Attributes:
        arguments: the arguments, as the help shows them.
        completer: completes the arguments.
        do: runs the command with the session and the text of the arguments.
    """

    arguments: str
    completer: Completer
    do: Handler


CHAT_COMMANDS: dict[str, Command] = {}


def _command(arguments: str = "", *words: str) -> Callable[[Handler], Handler]:
    """Return a decorator that registers a function as a command: `_files` is /files.

    Args:
        arguments: the arguments, as the help shows them; `FILE` is a file name.
        *words: completions of arguments that are not a file name.
    """
    paths = PathCompleter(expanduser=True)
    completer = paths if arguments == FILE else WordCompleter([*words])

    def register(do: Handler) -> Handler:
        CHAT_COMMANDS[do.__name__.replace("_", "/")] = Command(arguments, completer, do)
        return do

    return register


def run_command(session: Session, line: str) -> None:
    """Run the command that a line names.

    Raises:
        SnapKVError: there is no such command, or it fails.
        StopIteration: the command ends the chat.
    """
    name, _, rest = line.partition(" ")
    if name not in CHAT_COMMANDS:
        raise UnknownOptionError(
            f"unknown command {name}{suggestion(name, CHAT_COMMANDS)}: try /help"
        )
    command, rest = CHAT_COMMANDS[name], rest.strip()
    if rest and not command.arguments:
        raise SnapKVError(f"{name} takes no arguments, got {rest!r}")
    if command.arguments == FILE:
        rest = re.sub(r"""^(["'])(.*)\1$""", r"\2", rest)
        if not rest:
            raise SnapKVError(f"{name} needs a file name")
    command.do(session, rest)


class CommandCompleter(Completer):
    """Completes the names of commands and their arguments."""

    def get_completions(self, document, complete_event) -> Iterator:
        name, space, rest = document.text_before_cursor.partition(" ")
        if not space and name.startswith("/"):
            names = WordCompleter(list(CHAT_COMMANDS), WORD=True)
            yield from names.get_completions(Document(name), complete_event)
        elif name in CHAT_COMMANDS:
            yield from CHAT_COMMANDS[name].completer.get_completions(Document(rest), complete_event)


@_command(FILE)
def _file(session: Session, path: str) -> None:
    """attach a document to the next message"""
    text = from_first(partial(read_file, "/file", path))
    tokens = session.attach(text)
    session.names[text] = Path(path).name
    session.say(f"{session.names[text]}: {tokens:,} tokens, will be read with your next message")


@_command("[detach N]", "detach")
def _files(session: Session, rest: str) -> None:
    """list the attached files, or detach one that has not been read"""
    attached = session.conversation.attached
    waiting = {str(n): session.name_of(text) for n, text in enumerate(attached, start=1)}
    if rest:
        word, _, wanted = rest.partition(" ")
        number = next((n for n, name in waiting.items() if wanted.strip() in (n, name)), None)
        if word != "detach" or number is None:
            allowed = "detach and the number or name of a file that has not been read"
            raise SnapKVError(f"/files takes no arguments, or {allowed}, got {rest!r}")
        del attached[int(number) - 1]
        session.say(f"detached {waiting[number]}")
        return
    read = [session.name_of(text) for *texts, _ in session.conversation.said for text in texts]
    lines = [f"   {name}, part of the conversation" for name in read]
    lines += [f"{n}  {name}, will be read with your next message" for n, name in waiting.items()]
    session.say("\n".join(lines) or "no file is attached: /file FILE attaches one")


@_command()
def _undo(session: Session, _: str) -> None:
    """undo the last turn"""
    message = session.conversation.undo()
    is_unread = bool(session.conversation.said) and not session.conversation.read
    note = "; your next message will read the conversation again" if is_unread else ""
    session.say(f"undid the turn: {' '.join(message.split())[:60]}{note}{session.waiting}")


@_command()
def _retry(session: Session, _: str) -> None:
    """answer the last question again"""
    if not session.conversation.said:
        raise SnapKVError("the conversation is empty, so there is no question to answer again")
    if _answer_again(session) and session.sampling.temp == 0:
        session.say("the answer is the same, since temp is 0: with /set temp 0.7 it can differ")


def _answer_again(session: Session) -> bool:
    """Undo the last turn and answer its message again. Return whether the answer is the same."""
    conversation = session.conversation
    n_turns, last_answer = len(conversation.said), conversation.messages[-1:]
    message = conversation.undo()
    try:
        session.answer(message)
    finally:
        if len(conversation.said) < n_turns:
            session.say("the question was not answered again, and its turn is undone")
    return conversation.messages[-1:] == last_answer


@_command()
def _compare(session: Session, _: str) -> None:
    """answer the last question again, from all entries"""
    conversation = session.conversation
    if conversation.report is None or not conversation.report.compressed:
        raise SnapKVError("the full cache gave the last answer: there is nothing to compare")
    if not isinstance(conversation.policy, Sparse):
        raise SnapKVError("the evicted entries are gone: chat with --sparse")
    policy = conversation.policy
    try:
        # The last turn is read again from all entries. The entries of earlier turns stay as sparse attention made them.
        conversation.policy = Sparse(budget="100%", read="dense")
        is_same = _answer_again(session)
    finally:
        conversation.policy = policy
    result = "the same answer" if is_same else "a different answer, which replaces the first"
    session.say(f"from all entries: {result}")


@_command("[NAME VALUE]", *vars(SamplingOptions()))
def _set(session: Session, rest: str) -> None:
    """show or change the sampling options"""
    name, _, value = rest.partition(" ")
    if name:
        session.sampling = session.sampling.changed(name, value.strip(), session.context)
        conversation = session.conversation
        keywords = session.sampling.generate_keywords(conversation.tokenizer)
        conversation.generation.update(keywords)
    session.say(", ".join(f"{name} {value:g}" for name, value in vars(session.sampling).items()))


@_command()
def _stats(session: Session, _: str) -> None:
    """show the last turn's entries, memory and speed"""
    conversation = session.conversation
    report = conversation.report
    if report is None:
        session.say("there is no turn yet, or none since the conversation was loaded")
        return
    session.say(str(report))
    if entries := _entries_by_layer(report.entries_kept):
        session.say(f"entries: {entries}")
    caches = conversation.prompt_cache
    sizes = [f"{format_bytes(kv_bytes(caches))} in memory"]
    if n_bytes := file_bytes(caches):
        sizes.append(f"{format_bytes(n_bytes)} in files")
    if n_bytes := conversation.undo_nbytes:
        sizes.append(f"{format_bytes(n_bytes)} in memory for /undo")
    session.say(f"held between turns: {', '.join(sizes)}\nspeed: {session.speed}")


def _entries_by_layer(entries: Sequence[int | None]) -> str:
    """Return the entries of each layer as text, with one item for neighbouring layers of equal numbers."""
    items = []
    for n, group in groupby(enumerate(entries), key=lambda layer: layer[1]):
        first, *more = [layer for layer, _ in group]
        if n is not None:
            items.append(f"{n} in layer{f's {first} to {more[-1]}' if more else f' {first}'}")
    return ", ".join(items)


@_command(FILE)
def _save(session: Session, name: str) -> None:
    """save the conversation to a .safetensors file"""
    path = require_writable(name)
    line = f"saved in {path}{', replacing the earlier file' if path.exists() else ''}"
    session.conversation.save(path)
    session.replace(session.conversation)
    session.say(line)


@_command(FILE)
def _load(session: Session, path: str) -> None:
    """continue from a saved conversation or text"""
    if not session.may_replace():
        return
    current = session.conversation
    options: Any = {**session.options, **current.generation}
    loaded = Conversation.load(path, current.model, current.tokenizer, **options)
    session.replace(loaded)
    config, _ = CompressionConfig.from_keywords(session.options)
    is_same = (config.setting, config.keywords) == (loaded.policy, loaded.options)
    note = "" if is_same else ", as it was saved"
    session.say(f"{len(loaded.read):,} tokens loaded, {session.settings}{note}")


@_command(FILE)
def _export(session: Session, name: str) -> None:
    """write the conversation as Markdown"""
    if n_ranks() > 1:
        raise SnapKVError(f"/export does not run on several Macs: {WITHOUT_LAUNCH}")
    path = path_of(name, "/export")
    with refusing(f"/export {path}"):
        if require_place(path) and path.absolute() not in session.exported:
            if not session.lines.interactive:
                raise SnapKVError(f"/export {path}: the file exists, give another name")
            if not session.lines.agree(f"{path} exists: replace it?"):
                session.say("nothing was written")
                return
        put(path, session.as_markdown())
    session.exported.add(path.absolute())
    session.say(f"written to {path}")


@_command()
def _reset(session: Session, _: str) -> None:
    """start a new conversation"""
    session.start_again("started a new conversation")


@_command("[POLICY]", "none", AUTO, Sparse.name, *POLICIES)
def _policy(session: Session, text: str) -> None:
    """start a new conversation with this policy, or sparse:OPTIONS; none is the full cache"""
    conversation = session.conversation
    if not text:
        session.say(f"policy: {conversation.policy or 'none'}")
        return
    if text == AUTO:
        given = session.options | {"policy": AUTO}
        options = CompressionOptions(**given, kv_memory=session.context.params["kv_memory"])
        model, generation = conversation.model, conversation.generation
        max_tokens = generation.get("max_tokens")
        changes = recommended_keywords(
            options.recommend(model, None, CONVERSATION, session.say, generation, max_tokens)
        )
    else:
        changes = {"policy": None if text == "none" else setting_named(text)}
    policy = changes["policy"] or "none"
    session.start_again(f"started a new conversation with policy {policy}", **changes)


@_command("[TEXT]")
def _system(session: Session, text: str) -> None:
    """start a new conversation with this system prompt, or without one"""
    which = "with that" if text else "without a"
    session.start_again(f"started a new conversation {which} system prompt", system=text or None)


@_command()
def _help(session: Session, _: str) -> None:
    """show this list"""
    for name, command in CHAT_COMMANDS.items():
        session.say(f"{f'{name} {command.arguments}':24} {command.do.__doc__}")


@_command()
def _quit(session: Session, _: str) -> None:
    """leave the chat (also Ctrl-D)"""
    raise StopIteration
