"""The commands of a chat: lines that start with a slash."""

import re
from collections.abc import Callable, Iterator
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
from .cache_options import CompressionOptions, keywords_of
from .chat_session import Session
from .loading import ALONE_ONLY
from .options import SamplingOptions
from .prompts import read_file

FILE = "FILE"


class Command(NamedTuple):
    """A command: what may follow its name, what Tab completes, what it does, and what for by its docstring."""

    arguments: str
    completer: Completer
    do: Callable[[Session, str], None]


CHAT_COMMANDS: dict[str, Command] = {}


def _command(arguments: str = "", *words: str) -> Callable:
    """Makes a function a command of its name: `words` are what may follow, if it is no file."""
    paths = PathCompleter(expanduser=True)
    completer = paths if arguments == FILE else WordCompleter([*words])

    def register(do: Callable[[Session, str], None]) -> None:
        CHAT_COMMANDS[do.__name__.replace("_", "/")] = Command(arguments, completer, do)

    return register


def run_command(session: Session, line: str) -> None:
    """Do what a line says; SnapKVError if there is no such command, or it can't be done."""
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
    """Completes names of commands, and what follows them."""

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
        word, _, which = rest.partition(" ")
        which = next((n for n, name in waiting.items() if which.strip() in (n, name)), "")
        if word != "detach" or not which:
            what = "detach and the number or name of a file that has not been read"
            raise SnapKVError(f"/files takes no arguments, or {what}, got {rest!r}")
        del attached[int(which) - 1]
        session.say(f"detached {waiting[which]}")
        return
    read = [session.name_of(text) for *texts, _ in session.conversation.said for text in texts]
    lines = [f"   {name}, part of the conversation" for name in read]
    lines += [f"{n}  {name}, will be read with your next message" for n, name in waiting.items()]
    session.say("\n".join(lines) or "no file is attached: /file FILE attaches one")


@_command()
def _undo(session: Session, _: str) -> None:
    """undo the last turn"""
    typed = session.conversation.undo()
    again = bool(session.conversation.said) and not session.conversation.read
    how = "; your next message will read the conversation again" if again else ""
    session.say(f"undid the turn: {' '.join(typed.split())[:60]}{how}{session.waiting}")


@_command()
def _retry(session: Session, _: str) -> None:
    """answer the last question again"""
    if not session.conversation.said:
        raise SnapKVError("the conversation is empty, so there is no question to answer again")
    if _answers_the_same_again(session) and session.sampling.temp == 0:
        session.say("the answer is the same, since temp is 0: with /set temp 0.7 it can differ")


def _answers_the_same_again(session: Session) -> bool:
    now = session.conversation
    n_turns, earlier = len(now.said), now.messages[-1:]
    typed = now.undo()
    try:
        session.answer(typed)
    finally:
        if len(now.said) < n_turns:
            session.say("the question was not answered again, and its turn is undone")
    return now.messages[-1:] == earlier


@_command()
def _compare(session: Session, _: str) -> None:
    """answer the last question again, from all entries"""
    now = session.conversation
    if now.report is None or not now.report.compressed:
        raise SnapKVError("the full cache gave the last answer: there is nothing to compare")
    if not isinstance(now.policy, Sparse):
        raise SnapKVError("the evicted entries are gone: chat with --sparse")
    before = now.policy
    try:
        # A chat that reads little has read its earlier turns so: this one is read and answered from all it has read.
        now.policy = Sparse(budget="100%", read="dense")
        is_same = _answers_the_same_again(session)
    finally:
        now.policy = before
    result = "the same answer" if is_same else "a different answer, which replaces the first"
    session.say(f"from all entries: {result}")


@_command("[NAME VALUE]", *vars(SamplingOptions()))
def _set(session: Session, rest: str) -> None:
    """show or change the sampling options"""
    name, _, value = rest.partition(" ")
    if name:
        session.sampling = session.sampling.changed(name, value.strip(), session.context)
        now = session.conversation
        now.generation.update(session.sampling.generation(now.tokenizer))
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
    layers = []  # those that have entries, neighbours with as many together
    for n, group in groupby(enumerate(report.entries_kept), key=lambda layer: layer[1]):
        first, *more = [layer for layer, _ in group]
        if n is not None:
            layers.append(f"{n} in layer{f's {first} to {more[-1]}' if more else f' {first}'}")
    if layers:
        session.say(f"entries: {', '.join(layers)}")
    caches = conversation.prompt_cache
    others = {"in files": file_bytes(caches), "in memory for /undo": conversation.undo_nbytes}
    held = {"in memory": kv_bytes(caches), **{where: n for where, n in others.items() if n}}
    sizes = ", ".join(f"{format_bytes(n)} {where}" for where, n in held.items())
    session.say(f"held between turns: {sizes}\nspeed: {session.speed}")


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
    now = session.conversation
    given: Any = session.options
    loaded = Conversation.load(path, now.model, now.tokenizer, **given, **now.generation)
    session.replace(loaded)
    config, _ = CompressionConfig.taken_from(session.options)
    is_same = (config.setting, config.keywords) == (loaded.policy, loaded.options)
    whose = "" if is_same else ", as it was saved"
    session.say(f"{len(loaded.read):,} tokens loaded, {session.settings}{whose}")


@_command(FILE)
def _export(session: Session, name: str) -> None:
    """write the conversation as Markdown"""
    if n_ranks() > 1:
        raise SnapKVError(f"/export does not run on several Macs: {ALONE_ONLY}")
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
    now = session.conversation
    if not text:
        session.say(f"policy: {now.policy or 'none'}")
        return
    if text == AUTO:
        given = session.options | {"policy": AUTO}
        options = CompressionOptions(**given, kv_memory=session.context.params["kv_memory"])
        max_tokens = now.generation.get("max_tokens")
        changes = keywords_of(
            options.recommend(
                now.model, None, CONVERSATION, session.say, now.generation, max_tokens
            )
        )
    else:
        changes = {"policy": None if text == "none" else setting_named(text)}
    policy = changes["policy"] or "none"
    session.start_again(f"started a new conversation with policy {policy}", **changes)


@_command("[TEXT]")
def _system(session: Session, text: str) -> None:
    """start a new conversation with this system prompt, or without one"""
    how = "with that" if text else "without a"
    session.start_again(f"started a new conversation {how} system prompt", system=text or None)


@_command()
def _help(session: Session, _: str) -> None:
    """show this list"""
    for name, command in CHAT_COMMANDS.items():
        session.say(f"{f'{name} {command.arguments}':24} {command.do.__doc__}")


@_command()
def _quit(session: Session, _: str) -> None:
    """leave the chat (also Ctrl-D)"""
    raise StopIteration
