"""Pieces of a user's own texts, and what stands around a text in a prompt."""

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ..completions.chat_template import apply_template
from ..errors import SnapKVError
from ..paths import path_of, reason

OPTION = "--text"
TEXT_MARK = "THE TEXT STANDS HERE"


class Piece(NamedTuple):
    """A document's `number`th part, from 1: ids to be read, without special ones, and those after them."""

    document: str
    number: int
    tokens: list[int]
    following: list[int]


class Texts:
    """The UTF-8 texts of files, and of all files below folders but hidden ones, in order.

    A text's name is its path, or that below the folder.

    Raises: SnapKVError: a path can't be read, a file that was given is not UTF-8 text, or there is no text.
    """

    def __init__(self, paths: Sequence[str]):
        self._where = f"{OPTION} {' '.join(paths)}"
        self._texts: dict[str, str] = {}
        self.n_unread = 0  # files below folders that are not UTF-8 text
        for given in dict.fromkeys(paths):
            path = path_of(given, OPTION)
            below = (f for f in path.rglob("*") if "/." not in f"/{f.relative_to(path).as_posix()}")
            for file in sorted(filter(Path.is_file, below)) if path.is_dir() else [path]:
                text = _read(file)
                if text is None and file == path:
                    raise SnapKVError(f"{OPTION} {given} is not UTF-8 text: convert it first")
                self.n_unread += text is None
                if text:
                    self._texts[given if file == path else str(file.relative_to(path))] = text
        if not self._texts:
            raise SnapKVError(f"{self._where}: there is no UTF-8 text")
        self.digest = digest_of("\0".join(f"{name}\0{x}" for name, x in self._texts.items()))

    def pieces(self, tokenizer: Any, length: int, n_following: int, most: int) -> list[Piece]:
        """At most `most` disjoint pieces: the first of every text, then the second of every one, ...

        Raises: SnapKVError: no text is long enough.
        """
        size = length + n_following
        cut = [_cut(name, x, tokenizer, length, size) for name, x in self._texts.items()]
        rounds = itertools.chain.from_iterable(itertools.zip_longest(*cut))
        found = list(itertools.islice(filter(None, rounds), most))
        if not found:
            raise SnapKVError(
                f"{self._where}: no text has the {size:,} tokens of a piece and the tokens scored after it: give "
                "longer texts, or a lower --length"
            )
        return found


def digest_of(text: str) -> str:
    return f"sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _read(path: Path) -> str | None:
    """The text of a file, without white space around it; None if it is not text."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
    except (OSError, ValueError) as error:
        raise SnapKVError(f"{OPTION} {path}: {reason(error)}") from error
    return None if "\0" in text else text.strip()


def _cut(name: str, text: str, tokenizer: Any, length: int, size: int) -> Iterator[Piece]:
    """A text's pieces, one after the other; it is tokenized when the first is asked for."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    for number, start in enumerate(range(0, len(ids) - size + 1, size), start=1):
        end = start + length
        yield Piece(name, number, ids[start:end], ids[end : start + size])


class Frame(NamedTuple):
    """Token ids around a text: what it begins with by itself, and the beginning and end of a prompt about it."""

    start: list[int]
    before: list[int]
    after: list[int]


def frame_of(tokenizer: Any, question: str | None) -> Frame:
    """Around a text with a question behind it, in the chat template if there is one, or around a text alone."""
    start, encode = tokenizer.encode(""), partial(tokenizer.encode, add_special_tokens=False)
    if question is None:
        return Frame(start, start, [])
    if not tokenizer.has_chat_template:
        return Frame(start, start, encode(f"\n\n{question}\n"))
    return Frame(start, *map(encode, around(tokenizer, f"\n\n{question}")))


def around(tokenizer: Any, ending: str = "") -> tuple[str, str]:
    """What the chat template has before what the user says, and from its `ending` on.

    Raises: SnapKVError: the template fails, or changes what the user says.
    """
    messages = [{"role": "user", "content": f"{TEXT_MARK}{ending}"}]
    options = {"add_generation_prompt": True, "enable_thinking": False, "tokenize": False}
    text = apply_template(tokenizer, messages, **options)
    if text.count(TEXT_MARK) != 1:
        raise SnapKVError("the chat template changes what the user says")
    before, after = text.split(TEXT_MARK)
    return before, after
