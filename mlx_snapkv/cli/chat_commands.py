"""The commands of a chat: lines that start with a slash."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from prompt_toolkit.completion import Completer, PathCompleter, WordCompleter
from prompt_toolkit.document import Document

from ..caches.layers import file_bytes, kv_bytes
from ..chat.conversation import Conversation
from ..engine.report import format_bytes
from ..engine.retention import VERIFY
from ..errors import SnapKVError, UnknownOptionError, suggestion
from ..paths import path_of, put, refusing
from ..policies import POLICIES, resolve_policy
from ..saved import require_writable
from ..several.ranks import here
from .chat_session import Session
from .options import SamplingOptions
from .prompts import read_file
from .sharded import ALONE_ONLY, on_first


@dataclass(frozen=True)
class Command:
    """A command: what may follow its name, what it is for, what it does, and what Tab completes after its name."""

    arguments: str
    meaning: str
    do: Callable[[Session, str], None]
    completer: Completer | None = None


COMMANDS: dict[str, Command] = {}
_PATHS = PathCompleter(expanduser=True)


def _command(
    name: str, arguments: str, meaning: str, completer: Completer | None = None
) -> Callable:
    def register(do: Callable[[Session, str], None]) -> None:
        COMMANDS[name] = Command(arguments, meaning, do, completer)

    return register


def run_command(session: Session, line: str) -> None:
    """Do what a line says; SnapKVError if there is no such command, or it can't be done."""
    name, _, rest = line.partition(" ")
    if name not in COMMANDS:
        raise UnknownOptionError(
            f"unknown command {name}{suggestion(name, COMMANDS)}: /help lists them"
        )
    command, rest = COMMANDS[name], rest.strip()
    if rest and not command.arguments:
        raise SnapKVError(f"{name} takes nothing, got {rest!r}")
    if command.arguments == "FILE":
        if not rest:
            raise SnapKVError(f"{name} needs the name of a file")
        if len(rest) > 1 and rest[0] == rest[-1] and rest[0] in "\"'":
            rest = rest[1:-1]
    command.do(session, rest)


class CommandCompleter(Completer):
    """Completes names of commands, and what follows them."""

    def get_completions(self, document, complete_event) -> Iterator:
        name, space, rest = document.text_before_cursor.partition(" ")
        if not name.startswith("/"):
            return
        completer = COMMANDS[name].completer if space and name in COMMANDS else None
        if not space:
            completer, rest = WordCompleter(list(COMMANDS), WORD=True), name
        if completer is not None:
            yield from completer.get_completions(Document(rest), complete_event)


@_command("/file", "FILE", "put a document in front of the next message", _PATHS)
def _file(session: Session, path: str) -> None:
    text = on_first(partial(read_file, "/file", path))
    tokens = session.attach(text)
    session.names[text] = Path(path).name
    session.say(f"{session.names[text]}: {tokens:,} tokens, to be read with your next message")


@_command(
    "/files", "[detach N]", "the files attached; detach one that waits", WordCompleter(["detach"])
)
def _files(session: Session, rest: str) -> None:
    attached = session.conversation.attached
    waiting = {str(n): session.name_of(text) for n, text in enumerate(attached, start=1)}
    if rest:
        word, _, which = rest.partition(" ")
        which = next((n for n, name in waiting.items() if which.strip() in (n, name)), "")
        if word != "detach" or not which:
            raise SnapKVError(
                f"/files takes nothing or: detach and the number or name of a waiting file, got {rest!r}"
            )
        del attached[int(which) - 1]
        session.say(f"{waiting[which]} is detached")
        return
    read = [text for *documents, _ in session.conversation.said for text in documents]
    for text in read:
        session.say(f"   {session.name_of(text)}, part of the conversation")
    for n, name in waiting.items():
        session.say(f"{n}  {name}, to be read with your next message")
    if not read and not waiting:
        session.say("no file is attached: /file FILE attaches one")


@_command("/undo", "", "take back the last turn")
def _undo(session: Session, _: str) -> None:
    typed = session.conversation.undo()
    again = bool(session.conversation.said) and not session.conversation.read
    how = "; the conversation will be read again with your next message" if again else ""
    session.say(f"taken back: {' '.join(typed.split())[:60]}{how}{session.waiting}")


@_command("/retry", "", "answer the last question again")
def _retry(session: Session, _: str) -> None:
    earlier = session.conversation.messages[-1:]
    _answer_again(session)
    if session.sampling.temp == 0 and session.conversation.messages[-1:] == earlier:
        session.say("the same answer, since temp is 0: /set temp 0.7 lets it differ")


def _answer_again(session: Session) -> None:
    n_turns = len(session.conversation.said)
    typed = session.conversation.undo()
    try:
        session.answer(typed)
    finally:
        if len(session.conversation.said) < n_turns:
            session.say("the question was not answered again, and is taken back")


@_command("/compare", "", "answer the last question again from all entries")
def _compare(session: Session, _: str) -> None:
    now = session.conversation
    if now.report is None or not now.report.compressed:
        raise SnapKVError("the last answer was the full cache's: there is nothing to compare")
    if now.memory == "drop":
        raise SnapKVError("entries that were not kept are gone: chat with --memory recall")
    earlier, before = now.messages[-1]["content"], now.verify
    now.verify_answers("all")
    try:
        _answer_again(session)
    finally:
        now.verify = before
    same = now.messages[-1]["content"] == earlier
    session.say(f"from all entries: {'the same answer' if same else 'another answer'}; it stays")


@_command(
    "/set",
    "[NAME VALUE]",
    "how answers are sampled",
    WordCompleter([field.name for field in fields(SamplingOptions)]),
)
def _set(session: Session, rest: str) -> None:
    name, _, value = rest.partition(" ")
    if name:
        session.sample(name, value.strip())
    session.say(", ".join(f"{name} {value:g}" for name, value in vars(session.sampling).items()))


@_command(
    "/verify",
    "all|none",
    "how later answers are verified by all entries",
    WordCompleter([*VERIFY, "none"]),
)
def _verify(session: Session, text: str) -> None:
    if text not in ("", *VERIFY, "none"):
        raise SnapKVError(f"/verify takes {', '.join(VERIFY)} or none, got {text!r}")
    if text:
        session.conversation.verify_answers(None if text == "none" else text)
    session.say(f"verify: {session.conversation.verify or 'none'}")


@_command("/stats", "", "entries kept, memory and speed of the last turn")
def _stats(session: Session, _: str) -> None:
    conversation = session.conversation
    report = conversation.report
    if report is None:
        session.say("nothing has been said yet, or since the conversation was loaded")
        return
    session.say(str(report))
    layers = []  # those that have entries, neighbours with as many together
    for n, group in groupby(enumerate(report.entries_kept), key=lambda layer: layer[1]):
        numbers = [layer for layer, _ in group]
        first, last = numbers[0], numbers[-1]
        if n is not None:
            layers.append(f"{first}: {n}" if first == last else f"{first} to {last}: {n}")
    if layers:
        session.say(f"entries by layer: {', '.join(layers)}")
    caches = conversation.prompt_cache
    others = {" in files": file_bytes(caches), " for /undo": conversation.undo_nbytes}
    held = {"": kv_bytes(caches), **{where: n for where, n in others.items() if n}}
    sizes = ", ".join(f"{format_bytes(n)}{where}" for where, n in held.items())
    session.say(f"KV memory held between turns: {sizes}; {session.speed}")


@_command("/save", "FILE", "write the conversation to a .safetensors file", _PATHS)
def _save(session: Session, name: str) -> None:
    path = require_writable(name)
    replaced = path.exists()
    session.conversation.save(path)
    session.saved()
    session.say(f"saved in {path}{', in place of the one that was there' if replaced else ''}")


@_command("/load", "FILE", "go on with a saved conversation or text", _PATHS)
def _load(session: Session, path: str) -> None:
    if not session.may_replace():
        return
    now = session.conversation
    ways: Any = {**session.wanted, "refresh": now.refresh, "far": now.far}
    loaded = Conversation.load(path, now.model, now.tokenizer, **ways, **now.generation)
    if loaded.memory != "drop":
        loaded.verify_answers(now.verify)
    session.replace(loaded)
    own = {"policy": loaded.policy, "memory": loaded.memory}
    whose = "" if own == session.wanted else ", as it was saved"
    session.say(f"{len(loaded.read):,} tokens loaded, {session.ways}{whose}")


@_command("/export", "FILE", "write the conversation as Markdown", _PATHS)
def _export(session: Session, name: str) -> None:
    if here().size > 1:
        raise SnapKVError(f"/export does not run on several Macs: {ALONE_ONLY}")
    path = path_of(name, "/export")
    with refusing(f"/export {path}"):
        if path.is_dir():
            raise SnapKVError(f"/export {path} is a folder: give a file name")
        if path.exists() and path.absolute() not in session.exported:
            if not session.lines.interactive:
                raise SnapKVError(
                    f"/export {path}: there is such a file already, give another name"
                )
            if not session.lines.agree(f"{path} is there already: replace it?"):
                session.say("nothing was written")
                return
        put(path, session.as_markdown())
    session.exported.add(path.absolute())
    session.say(f"written to {path}")


@_command("/reset", "", "forget the conversation")
def _reset(session: Session, _: str) -> None:
    if session.may_replace():
        session.start_again()
        session.say("the conversation is forgotten")


@_command(
    "/policy",
    "[POLICY]",
    "start again with this policy; none for the full cache",
    WordCompleter(["none", *POLICIES]),
)
def _policy(session: Session, text: str) -> None:
    if not text:
        session.say(f"policy: {session.conversation.policy or 'none'}")
        return
    policy = None if text == "none" else resolve_policy(policy=text)
    if session.may_replace():
        session.start_again(policy=policy)
        session.say(f"a new conversation with policy {policy or 'none'}")


@_command("/system", "[TEXT]", "start again with this system prompt, or none")
def _system(session: Session, text: str) -> None:
    if session.may_replace():
        session.start_again(system=text or None)
        session.say(f"a new conversation {'with that' if text else 'without a'} system prompt")


@_command("/help", "", "this list")
def _help(session: Session, _: str) -> None:
    for name, command in COMMANDS.items():
        session.say(f"{f'{name} {command.arguments}':24} {command.meaning}")


@_command("/quit", "", "leave (also Ctrl-D)")
def _quit(session: Session, _: str) -> None:
    raise StopIteration
