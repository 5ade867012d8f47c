"""The commands of a chat: lines that start with a slash."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import get_args, get_type_hints

from prompt_toolkit.completion import Completer, PathCompleter, WordCompleter
from prompt_toolkit.document import Document

from ..caches.layers import file_bytes, kv_bytes
from ..chat.conversation import Conversation
from ..engine.recalling import VERIFY
from ..engine.report import format_bytes
from ..errors import SnapKVError, UnknownOptionError
from ..paths import path_of, put
from ..policies import POLICIES, resolve_policy
from ..policies.base import suggestion
from ..saved import require_writable
from .chat_session import Session, as_markdown
from .options import SamplingOptions
from .prompt_text import read_file
from .sharded import on_first

SETTINGS = get_type_hints(SamplingOptions, include_extras=True)  # of /set: types with bounds


@dataclass(frozen=True)
class Command:
    """A command: what may follow its name, what it is for, and what it does.

    Attributes:
        completer: what Tab completes after its name.
    """

    arguments: str
    meaning: str
    do: Callable[[Session, str], None]
    completer: Completer | None = None


def run_command(session: Session, line: str) -> None:
    """Raises: SnapKVError: there is no such command, or it can't be done."""
    name, _, rest = line.partition(" ")
    if name not in COMMANDS:
        close = suggestion(name, COMMANDS)
        raise UnknownOptionError(f"unknown command {name}{close}: /help lists them")
    command, rest = COMMANDS[name], rest.strip()
    if rest and not command.arguments:
        raise SnapKVError(f"{name} takes nothing, got {rest!r}")
    command.do(session, rest)


class CommandCompleter(Completer):
    """Completes names of commands, and what follows them."""

    def get_completions(self, document, complete_event) -> Iterator:
        name, space, rest = document.text_before_cursor.partition(" ")
        if not name.startswith("/"):
            return
        completer: Completer | None = WordCompleter(list(COMMANDS), WORD=True)
        if space:
            completer = COMMANDS[name].completer if name in COMMANDS else None
        if completer is not None:
            rest = rest if space else name
            yield from completer.get_completions(Document(rest), complete_event)


def _file(session: Session, name: str) -> None:
    path = _named("/file", name)
    text = on_first(partial(read_file, "/file", path))
    tokens = session.attach(text)
    session.names[text] = Path(path).name
    session.say(f"{session.names[text]}: {tokens:,} tokens, to be read with your next message")


def _files(session: Session, rest: str) -> None:
    attached = session.conversation.attached
    if rest:
        session.say(f"{session.name_of(attached.pop(_place(session, rest)))} is detached")
        return
    read = [text for *documents, _ in session.conversation.said for text in documents]
    for text in read:
        session.say(f"   {session.name_of(text)}, part of the conversation")
    for n, text in enumerate(attached, start=1):
        session.say(f"{n}  {session.name_of(text)}, to be read with your next message")
    if not read and not attached:
        session.say("no file is attached: /file FILE attaches one")


def _place(session: Session, rest: str) -> int:
    """Which of the waiting documents `detach NUMBER` or `detach NAME` names."""
    word, _, which = rest.partition(" ")
    names = [session.name_of(text) for text in session.conversation.attached]
    known = [str(n) for n in range(1, len(names) + 1)]
    which = which.strip()
    if word != "detach" or which not in (*known, *names):
        raise SnapKVError(
            f"/files takes nothing or: detach and the number or name of a waiting file, got {rest!r}"
        )
    return known.index(which) if which in known else names.index(which)


def _undo(session: Session, _: str) -> None:
    typed = session.conversation.undo()
    again = bool(session.conversation.said) and not session.conversation.read
    how = "; the conversation will be read again with your next message" if again else ""
    session.say(f"taken back: {' '.join(typed.split())[:60]}{how}{session.waiting}")


def _retry(session: Session, _: str) -> None:
    earlier = session.conversation.messages[-1:]
    n_turns = len(session.conversation.said)
    typed = session.conversation.undo()
    try:
        session.answer(typed)
    finally:
        if len(session.conversation.said) < n_turns:
            session.say("the question was not answered again, and is taken back")
    if session.sampling.temp == 0 and session.conversation.messages[-1:] == earlier:
        session.say("the same answer, since temp is 0: /set temp 0.7 lets it differ")


def _set(session: Session, rest: str) -> None:
    name, _, value = rest.partition(" ")
    if name:
        session.sample(_changed(session.sampling, name, value.strip()))
    values = (f"{name} {value:g}" for name, value in vars(session.sampling).items())
    session.say(", ".join(values))


def _changed(sampling: SamplingOptions, name: str, text: str) -> SamplingOptions:
    """The sampling with another value of one setting.

    Raises:
        SnapKVError: there is no such setting, or its flag would not take that value.
    """
    name = name.lstrip("-").replace("-", "_")
    if name not in SETTINGS:
        close = suggestion(name, SETTINGS)
        known = ", ".join(f"/set {setting}" for setting in SETTINGS)
        raise UnknownOptionError(f"unknown setting {name}{close}: one of {known}")
    kind, option = get_args(SETTINGS[name])
    try:
        value = kind(text)
    except ValueError:
        value = None
    low, high = option.min, option.max
    if value is None or not low <= value <= (value if high is None else high):
        bounds = f"from {low}" if high is None else f"from {low} to {high}"
        number = "a whole number" if kind is int else "a number"
        raise SnapKVError(f"/set {name} must be {number} {bounds}, got {text!r}")
    return replace(sampling, **{name: value})


def _reset(session: Session, _: str) -> None:
    if session.may_replace():
        session.start_again()
        session.say("the conversation is forgotten")


def _stats(session: Session, _: str) -> None:
    conversation = session.conversation
    report = conversation.report
    if report is None:
        session.say("nothing has been said yet, or since the conversation was loaded")
        return
    session.say(str(report))
    if layers := _by_layer(report.entries_kept):
        session.say(f"entries by layer: {layers}")
    held = format_bytes(kv_bytes(conversation.prompt_cache))
    if file_bytes(conversation.prompt_cache):
        held += f", {format_bytes(file_bytes(conversation.prompt_cache))} in files"
    if conversation.undo_nbytes:
        held += f", {format_bytes(conversation.undo_nbytes)} for /undo"
    session.say(f"KV memory held between turns: {held}; {session.speed}")


def _by_layer(entries: Sequence[int | None]) -> str:
    """The entries of each layer that has some, neighbours with as many together."""
    said = []
    for n, layers in groupby(enumerate(entries), key=lambda layer: layer[1]):
        (first, _), *_, (last, _) = [*layers] * 2
        if n is not None:
            said.append(f"{first}: {n}" if first == last else f"{first} to {last}: {n}")
    return ", ".join(said)


def _save(session: Session, name: str) -> None:
    path = require_writable(_named("/save", name))
    replaced = path.exists()
    session.conversation.save(path)
    session.saved()
    session.say(f"saved in {path}{', in place of the one that was there' if replaced else ''}")


def _load(session: Session, name: str) -> None:
    path = _named("/load", name)
    if not session.may_replace():
        return
    now = session.conversation
    wanted = (session.policy_wanted, session.memory_wanted)
    loaded = Conversation.load(
        path,
        now.model,
        now.tokenizer,
        policy=wanted[0],
        memory=wanted[1],
        refresh=now.refresh,
        far=now.far,
        **now.generation,
    )
    if loaded.memory != "drop":
        loaded.verify_answers(now.verify)
    session.replace(loaded)
    whose = "" if (loaded.policy, loaded.memory) == wanted else ", as it was saved"
    session.say(f"{len(loaded.read):,} tokens loaded, {session.ways}{whose}")


def _export(session: Session, name: str) -> None:
    path = path_of(_named("/export", name), "/export")
    if session.lines.shared:
        raise SnapKVError("/export does not run on several Macs: start the chat without mlx.launch")
    text = as_markdown(session)
    ours = str(path.absolute()) in session.exported
    if path.is_dir():
        raise SnapKVError(f"/export {path} is a folder: give a file name")
    if path.exists() and not ours:
        if not session.lines.interactive:
            raise SnapKVError(f"/export {path}: there is such a file already, give another name")
        if not session.lines.agree(f"{path} is there already: replace it?"):
            session.say("nothing was written")
            return
    try:
        put(path, text)
    except (OSError, ValueError) as error:
        raise SnapKVError(f"/export {path}: {getattr(error, 'strerror', None) or error}") from error
    session.exported.add(str(path.absolute()))
    session.say(f"written to {path}")


def _policy(session: Session, text: str) -> None:
    if not text:
        session.say(f"policy: {session.conversation.policy or 'none'}")
        return
    policy = None if text == "none" else resolve_policy(policy=text)
    if session.may_replace():
        session.start_again(policy=policy)
        session.say(f"a new conversation with policy {policy or 'none'}")


def _verify(session: Session, text: str) -> None:
    if text not in ("", *VERIFY, "none"):
        raise SnapKVError(f"/verify takes {', '.join(VERIFY)} or none, got {text!r}")
    if text:
        session.conversation.verify_answers(None if text == "none" else text)
    session.say(f"verify: {session.conversation.verify or 'none'}")


def _system(session: Session, text: str) -> None:
    if session.may_replace():
        session.start_again(system=text or None)
        session.say(f"a new conversation {'with that' if text else 'without a'} system prompt")


def _help(session: Session, _: str) -> None:
    for name, command in COMMANDS.items():
        session.say(f"{f'{name} {command.arguments}':24} {command.meaning}")


def _quit(session: Session, _: str) -> None:
    raise StopIteration


def _named(command: str, name: str) -> str:
    """A file name as it was typed, with or without quotes."""
    if not name:
        raise SnapKVError(f"{command} needs the name of a file")
    quoted = len(name) > 1 and name[0] == name[-1] and name[0] in "\"'"
    return name[1:-1] if quoted else name


_PATHS = PathCompleter(expanduser=True)

COMMANDS = {
    "/file": Command("FILE", "put a document in front of the next message", _file, _PATHS),
    "/files": Command(
        "[detach N]", "the files attached; detach one that waits", _files, WordCompleter(["detach"])
    ),
    "/undo": Command("", "take back the last turn", _undo),
    "/retry": Command("", "answer the last question again", _retry),
    "/set": Command("[NAME VALUE]", "how answers are sampled", _set, WordCompleter(list(SETTINGS))),
    "/verify": Command(
        "all|none",
        "how later answers are verified by all entries",
        _verify,
        WordCompleter([*VERIFY, "none"]),
    ),
    "/stats": Command("", "entries kept, memory and speed of the last turn", _stats),
    "/save": Command("FILE", "write the conversation to a .safetensors file", _save, _PATHS),
    "/load": Command("FILE", "go on with a saved conversation or text", _load, _PATHS),
    "/export": Command("FILE", "write the conversation as Markdown", _export, _PATHS),
    "/reset": Command("", "forget the conversation", _reset),
    "/policy": Command(
        "[POLICY]",
        "start again with this policy; none for the full cache",
        _policy,
        WordCompleter(["none", *POLICIES]),
    ),
    "/system": Command("[TEXT]", "start again with this system prompt, or none", _system),
    "/help": Command("", "this list", _help),
    "/quit": Command("", "leave (also Ctrl-D)", _quit),
}
