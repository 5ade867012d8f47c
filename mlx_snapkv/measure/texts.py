"""Read a user's texts, cut them into pieces, and build the prompt tokens around a text."""

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..completions.chat_template import apply_template
from ..errors import SnapKVError
from ..paths import path_of, reason

OPTION = "--text"
TEXT_MARK = "THE TEXT STANDS HERE"  # placeholder for the text while the chat template is applied


class Piece(NamedTuple):
    """A piece of a text.

    Attributes:
        document: name of the text.
        number: position of the piece in the text, starting at 1.
        tokens: token ids of the piece, without special tokens.
        following: token ids that follow the piece in the text.
    """

    document: str
    number: int
    tokens: list[int]
    following: list[int]


class Texts:
    """UTF-8 texts from files and from all non-hidden files in folders.

    The texts are in the order of `paths`. The files in a folder are sorted by path.

    A text's name is its file's path as given or, for a file in a folder, the path relative to that folder.

    Args:
        paths: files and folders.

    Attributes:
        n_unread: number of files in folders that were skipped because they are not UTF-8 text.
        digest: hash of all names and texts.

    Raises: SnapKVError: a path can't be read, a file in `paths` is not UTF-8 text, or there is no text.
    """

    def __init__(self, paths: Sequence[str]):
        """Read all files. Folders are searched recursively."""
        self._option_text = f"{OPTION} {' '.join(paths)}"
        self._texts: dict[str, str] = {}
        self.n_unread = 0
        for name in dict.fromkeys(paths):  # drops duplicates, keeps the order
            path = path_of(name, OPTION)
            if path.is_dir():
                self._add_folder(path)
            else:
                self._add_file(name, path)
        if not self._texts:
            raise SnapKVError(f"{self._option_text}: there is no UTF-8 text")
        names_and_texts = (f"{name}\0{text}" for name, text in self._texts.items())
        self.digest = digest_of("\0".join(names_and_texts))

    def _add_file(self, name: str, path: Path) -> None:
        """Add a file's text. Raises: SnapKVError: the file is not UTF-8 text, or can't be read."""
        text = _read_utf8(path)
        if text is None:
            raise SnapKVError(f"{OPTION} {name} is not UTF-8 text: convert it first")
        if text:
            self._texts[name] = text

    def _add_folder(self, folder: Path) -> None:
        """Add the texts of all files in a folder and count the files that are not UTF-8 text."""
        for file in sorted(folder.rglob("*")):
            name = file.relative_to(folder)
            is_hidden = any(part.startswith(".") for part in name.parts)
            if is_hidden or not file.is_file():
                continue
            text = _read_utf8(file)
            if text is None:
                self.n_unread += 1
            elif text:
                self._texts[str(name)] = text

    def pieces(self, tokenizer: Any, length: int, n_following: int, n_pieces: int) -> list[Piece]:
        """Return up to `n_pieces` disjoint pieces: the first piece of every text, then the second, and so on.

        Args:
            tokenizer: the model's tokenizer.
            length: number of tokens in a piece.
            n_following: number of tokens that must follow a piece.
            n_pieces: maximum number of pieces.

        Raises: SnapKVError: no text is long enough.
        """
        n_needed = length + n_following
        pieces_by_text = [
            _cut_pieces(name, text, tokenizer, length, n_needed)
            for name, text in self._texts.items()
        ]
        # Each round has the next piece of every text, or None once a text has no more.
        rounds = itertools.zip_longest(*pieces_by_text)
        all_pieces = (piece for pieces in rounds for piece in pieces if piece is not None)
        first_pieces = list(itertools.islice(all_pieces, n_pieces))
        if not first_pieces:
            raise SnapKVError(
                f"{self._option_text}: no text has the {n_needed:,} tokens of a piece and the tokens scored after it: "
                "give longer texts, or a lower --length"
            )
        return first_pieces


def digest_of(text: str) -> str:
    """Return a short hash of a text, such as "sha256 0123456789abcdef"."""
    return f"sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _read_utf8(path: Path) -> str | None:
    """Read a file's text and strip surrounding white space.

    Return None if the file is not UTF-8 text.

    Raises: SnapKVError: the file can't be read.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
    except (OSError, ValueError) as error:
        raise SnapKVError(f"{OPTION} {path}: {reason(error)}") from error
    return None if "\0" in text else text.strip()


def _cut_pieces(
    name: str, text: str, tokenizer: Any, length: int, n_needed: int
) -> Iterator[Piece]:
    """Yield successive pieces of a text. The text is tokenised when the first piece is needed.

    Args:
        name: name of the text.
        text: the text.
        tokenizer: the model's tokenizer.
        length: number of tokens in a piece.
        n_needed: `length` plus the number of tokens that must follow a piece.
    """
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    starts = range(0, len(token_ids) - n_needed + 1, n_needed)
    for number, start in enumerate(starts, start=1):
        end = start + length
        following = token_ids[end : start + n_needed]
        yield Piece(name, number, token_ids[start:end], following)


class Frame(NamedTuple):
    """Token ids around a text.

    Attributes:
        start: special tokens at the start of a standalone text.
        before, after: tokens before and after the text in a prompt.
    """

    start: list[int]
    before: list[int]
    after: list[int]


def frame_of(tokenizer: Any, question: str | None) -> Frame:
    """Return the tokens to put around a text, including a question about it. Use the chat template if there is one.

    Args:
        tokenizer: the model's tokenizer.
        question: the question. If None, no question is asked and the chat template is not used.
    """
    start = tokenizer.encode("")  # special tokens only
    if question is None:
        return Frame(start=start, before=start, after=[])
    if not tokenizer.has_chat_template:
        after = tokenizer.encode(f"\n\n{question}\n", add_special_tokens=False)
        return Frame(start=start, before=start, after=after)
    # The template's text already contains the special tokens.
    text_before, text_after = template_around(tokenizer, ending=f"\n\n{question}")
    return Frame(
        start=start,
        before=tokenizer.encode(text_before, add_special_tokens=False),
        after=tokenizer.encode(text_after, add_special_tokens=False),
    )


def template_around(tokenizer: Any, ending: str = "") -> tuple[str, str]:
    """Return what the chat template puts before and after a text in a user message.

    The message is the text followed by `ending`, so the second result begins with `ending`.

    Raises: SnapKVError: the template fails, or changes the message.
    """
    messages = [{"role": "user", "content": f"{TEXT_MARK}{ending}"}]
    options = {"add_generation_prompt": True, "enable_thinking": False, "tokenize": False}
    text = apply_template(tokenizer, messages, **options)
    if text.count(TEXT_MARK) != 1:
        raise SnapKVError("the chat template changes what the user says")
    before, after = text.split(TEXT_MARK)
    return before, after
