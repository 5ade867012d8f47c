"""Heterogeneous text with paragraphs of essays, code, logs, dialogues and tables.

Essays and code are cut from files. Logs, dialogues and tables are drawn from a random generator, so that a seed
determines the text.
"""

import itertools
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from mlx_snapkv.errors import SnapKVError

# Characters per paragraph. Shorter ones are titles and imports, and longer ones are cut between lines.
LEAST, MOST = 120, 600
# Kind -> subfolder of the folder of real texts, and its files.
SOURCES = {"essay": ("essays", "*.txt"), "code": ("code", "*.py")}

SERVICES = "gateway billing mailer search-index thumbnails scheduler auth-proxy metrics".split()
EVENTS = (
    "request {n} took {ms} ms",
    "queue length {n}",
    "retry {k} of 5 after {ms} ms",
    "connection from 10.0.{k}.{b} closed",
    "checkpoint {n} written in {ms} ms",
    "cache hit ratio 0.{b}",
    "worker {k} restarted with code {b}",
)
SPEAKERS = (
    ("Clerk", "Traveller"),
    ("Host", "Neighbour"),
    ("Foreman", "Apprentice"),
    ("Librarian", "Reader"),
    ("Gardener", "Owner"),
)
LINES = (
    "The {k} o'clock train is {b} minutes late again.",
    "Have you heard the forecast? Rain until {day}, they say.",
    "I counted {n} parcels, but the list says {b}.",
    "Could you sign here, and once more on page {k}?",
    "The lift has been out of order since {day}.",
    "That will take {k} weeks, if the tiles arrive in time.",
    "I would rather wait until {day}, to be honest.",
    "There were {b} people in the queue this morning.",
    "Then we need {k} more boxes, and a longer ladder.",
)
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday".split()
GOODS = (
    "screws, 4 mm",
    "printer paper",
    "copper wire",
    "paint, white",
    "gloves",
    "batteries",
    "rope, 10 m",
    "envelopes",
    "light bulbs",
    "sandpaper",
    "labels",
    "hinges",
)

# Writes a paragraph of one kind, which contains the given sentence unless that is empty.
Write = Callable[[random.Random, str], str]


def _numbers(rng: random.Random) -> dict[str, object]:
    """Draw values for a template's placeholders."""
    n, b, k, ms = rng.randint(2, 900), rng.randint(10, 99), rng.randint(2, 9), rng.randint(3, 4000)
    return {"n": n, "b": b, "k": k, "ms": ms, "day": rng.choice(DAYS)}


def _hide(rng: random.Random, lines: list[str], sentence: str) -> list[str]:
    """Insert a sentence between two lines, unless it is empty."""
    index = rng.randint(1, len(lines) - 1) if len(lines) > 1 else 1
    return [*lines[:index], sentence, *lines[index:]] if sentence else lines


def log(rng: random.Random, sentence: str = "") -> str:
    """Return log lines. The sentence becomes the message of one line."""
    messages = [rng.choice(EVENTS).format(**_numbers(rng)) for _ in range(rng.randint(4, 6))]
    day, second = f"{rng.randint(1, 12):02}-{rng.randint(1, 28):02}", rng.randrange(20 * 3600)
    lines = []
    for message in _hide(rng, messages, sentence):
        second += rng.randint(1, 90)
        time = f"{second // 3600:02}:{second // 60 % 60:02}:{second % 60:02}"
        level = rng.choice(("INFO", "INFO", "INFO", "WARN", "DEBUG"))
        lines.append(f"2031-{day} {time} {level} {rng.choice(SERVICES)}: {message}")
    return "\n".join(lines)


def dialogue(rng: random.Random, sentence: str = "") -> str:
    """Return a dialogue between two speakers, one of whom says the sentence."""
    speakers = rng.sample(rng.choice(SPEAKERS), 2)
    lines = [line.format(**_numbers(rng)) for line in rng.sample(LINES, rng.randint(4, 6))]
    lines = _hide(rng, lines, sentence)
    turns = zip(itertools.cycle(speakers), lines)
    return "\n".join(f"{speaker}: {line}" for speaker, line in turns)


def table(rng: random.Random, sentence: str = "") -> str:
    """Return a table of goods. The sentence is a note in its own row."""
    rows = [
        f"| {goods} | {rng.randint(1, 400)} | {rng.randint(1, 90)}.{rng.randint(0, 99):02} |  |"
        for goods in rng.sample(GOODS, rng.randint(3, 5))
    ]
    rows = _hide(rng, rows, f"| note |  |  | {sentence} |" if sentence else "")
    return "\n".join(["| item | pieces | price | remark |", "| --- | --- | --- | --- |", *rows])


class Haystack:
    """Paragraphs of every kind, from a folder's files and from a random generator.

    Args:
        folder: folder that contains the folders of `SOURCES`, as written by scripts/make_real_models.py.
        avoided: words that no paragraph may contain, in upper or lower case.

    Attributes:
        texts: paragraphs from files, by kind.

    Raises: SnapKVError: the folder has no essays or no code.
    """

    def __init__(self, folder: Path, avoided: list[str]):
        """Read the essays and the code, and drop paragraphs with an avoided word."""
        any_word = "|".join(map(re.escape, avoided))
        avoided_word = re.compile(rf"(?<!\w)({any_word})(?!\w)", re.I)
        self.texts: dict[str, list[str]] = {}
        for kind, (name, files) in SOURCES.items():
            texts = [path.read_text("utf-8") for path in sorted((folder / name).glob(files))]
            paragraphs = [paragraph for text in texts for paragraph in paragraphs_of(text)]
            self.texts[kind] = [
                paragraph for paragraph in paragraphs if not avoided_word.search(paragraph)
            ]
            if not self.texts[kind]:
                raise SnapKVError(f"{folder / name} has no {files}: run make real-models")
        self._write_by_kind: dict[str, Write] = {
            "essay": self._essay,
            "code": self._code,
            "log": log,
            "dialogue": dialogue,
            "table": table,
        }

    def paragraphs(self, rng: random.Random) -> Iterator[str]:
        """Yield an endless stream of paragraphs, with each kind once per round."""
        while True:
            for kind in rng.sample([*self._write_by_kind], len(self._write_by_kind)):
                yield self._write_by_kind[kind](rng, "") + "\n\n"

    def hiding(self, rng: random.Random, sentence: str) -> str:
        """Return a paragraph of a random kind that contains the sentence."""
        return self._write_by_kind[rng.choice([*self._write_by_kind])](rng, sentence) + "\n\n"

    def _essay(self, rng: random.Random, sentence: str) -> str:
        """Return an essay's paragraph, with the sentence between two of its sentences or at its end."""
        text = rng.choice(self.texts["essay"])
        if not sentence:
            return text
        sentence_ends = [match.end() for match in re.finditer(r"[.!?]\s", text)] or [len(text)]
        index = rng.choice(sentence_ends)
        return f"{text[:index].rstrip()} {sentence} {text[index:]}".rstrip()

    def _code(self, rng: random.Random, sentence: str) -> str:
        """Return lines of code, with the sentence as a comment."""
        lines = rng.choice(self.texts["code"]).split("\n")
        return "\n".join(_hide(rng, lines, f"# {sentence}" if sentence else ""))


def paragraphs_of(text: str) -> Iterator[str]:
    """Yield a text's paragraphs of `LEAST` to `MOST` characters. Longer paragraphs are cut between lines."""
    for paragraph in re.split(r"\n\s*\n", text):
        pieces = [""]
        for line in paragraph.strip("\n").splitlines():
            if len(pieces[-1]) + len(line) > MOST:
                pieces.append("")
            pieces[-1] += f"{line}\n"
        yield from (piece.rstrip() for piece in pieces if LEAST <= len(piece) <= MOST)
