"""Generate training sequences: question answering over documents, and copying.

A sequence is a list of token ids, with a label for each token: text, answer, or repetition of a copied segment.
"""

import json
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from evaluation.suite_tasks import TASKS
from tokenizers import Tokenizer
from training_tokenizer import BOS, END, ROLES

from mlx_snapkv.demo import documents

TEXT, ANSWER, COPY = 0, 1, 2

# Share of documents whose facts all have the same attribute, so that the model must match the subject.
SAME_ATTRIBUTE = 0.5

TASK_SHARE = 0.75  # share of harder tasks in mixes that have them

Sequence = tuple[list[int], list[int]]  # ids, labels


@dataclass
class Mix:
    """Composition of a batch.

    Attributes:
        length: tokens per sequence.
        facts: facts per 1,000 tokens; a document has at least 2.
        questions: maximum number of questions per document.
        copy: share of copying sequences.
        made_up: probability that a word in a subject is invented.
        tasks: harder tasks. If there are any, they make up `TASK_SHARE` of the sequences that are not for copying.
    """

    length: int
    facts: float
    questions: int = 12
    copy: float = 0.05
    made_up: float = 0.15
    tasks: tuple[str, ...] = ()


class SequenceMaker:
    """Generates random sequences, and batches of them."""

    def __init__(self, tokenizer: Tokenizer, seed: int):
        """Look up the special tokens and seed the generator."""
        self.rng = random.Random(seed)
        self.tokenizer = tokenizer
        self.bos, self.end = tokenizer.token_to_id(BOS), tokenizer.token_to_id(END)
        self.system, self.user, self.assistant = (tokenizer.token_to_id(role) for role in ROLES)
        self.n_special = 2 + len(ROLES)

    def encode(self, text: str) -> list[int]:
        """Return a text's tokens, without special tokens."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def count(self, text: str) -> int:
        """Return the number of tokens in a text."""
        return len(self.encode(text))

    def question_answering(self, mix: Mix) -> Sequence:
        """Return a document with facts and questions, either as a chat or as continued text."""
        rng = self.rng
        n_facts = self._n_hidden(mix)
        attributes = list(documents.ATTRIBUTES)
        if rng.random() < SAME_ATTRIBUTE:
            attributes = [rng.choice(attributes)]
        facts = documents.make_facts(rng, n_facts, mix.made_up, attributes)
        asked = rng.sample(facts, min(n_facts, mix.questions))

        def document(n_tokens: int) -> str:
            hidden = [documents.fact_sentence(fact, rng) for fact in facts]
            return documents.hide(rng, hidden, n_tokens, self.count)

        if rng.random() < 0.6:
            return self._chat(mix, asked, document)
        turns = []  # sentences that continue the text
        for i, fact in enumerate(asked):
            lead = f"The {fact.attribute} of the {fact.subject} is"
            begun = self.encode(("\n" if i else "\n\n") + lead)
            turns.append((begun, self.encode(f" {fact.value}.")))
        return self._sequence(mix, [self.bos], document, turns)

    def task(self, mix: Mix) -> Sequence:
        """Return one of the harder tasks, as a chat."""
        sentences, questions = TASKS[self.rng.choice(mix.tasks)](self.rng, self._n_hidden(mix))

        def document(n_tokens: int) -> str:
            return documents.hide(self.rng, sentences, n_tokens, self.count, in_order=True)

        return self._chat(mix, questions[: mix.questions], document)

    def _n_hidden(self, mix: Mix) -> int:
        """Return a random number of sentences to hide."""
        return max(2, round(mix.facts * mix.length / 1000 * self.rng.uniform(0.5, 1.5)))

    def _chat(self, mix: Mix, asked, document: Callable[[int], str]) -> Sequence:
        """Return a chat: the document and the first question in the first turn, then one question per turn."""
        turns = []
        for i, question in enumerate(asked):
            separator = [self.user] if i else self.encode("\n\n")
            prompt = separator + self.encode(question.question) + [self.assistant]
            turns.append((prompt, [*self.encode(f" {question.value}"), self.end]))
        head = [self.bos]
        if self.rng.random() < 0.1:
            head += [self.system, *self.encode("Answer the question about the document.")]
        return self._sequence(mix, [*head, self.user], document, turns)

    def _sequence(
        self, mix: Mix, head: list[int], document: Callable[[int], str], turns: list[Sequence]
    ) -> Sequence:
        """Return a sequence of `head`, a document and `turns`.

        Turns are added until they exceed half of the length. The document fills the rest.

        Args:
            mix: composition of the batch, which determines the length.
            head: tokens before the document.
            document: generates a document of a given number of tokens.
            turns: prompts and answers, as tokens.
        """
        tail: list[int] = []
        labels: list[int] = []
        for prompt, answer in turns:
            tail += prompt + answer
            labels += [TEXT] * len(prompt) + [ANSWER] * len(answer)
            if len(tail) > mix.length // 2:
                break
        body = self.encode(document(max(mix.length - len(tail) - len(head), 0)))
        ids = head + body + tail
        return ids, [TEXT] * (len(head) + len(body)) + labels

    def copying(self, mix: Mix) -> Sequence:
        """Return segments of random tokens or text, each repeated once."""
        rng = self.rng
        ids, labels = [self.bos], [TEXT]
        while len(ids) < mix.length:
            n = rng.randint(8, max(9, min(mix.length // 2, 192)))
            if rng.random() < 0.5:
                piece = [
                    rng.randrange(self.n_special, self.tokenizer.get_vocab_size()) for _ in range(n)
                ]
            else:
                text = " ".join(
                    documents.fact_sentence(f, rng)
                    for f in documents.make_facts(rng, n // 12 + 1, 0.3)
                )
                piece = self.encode(text)[:n]
            ids += piece + piece
            labels += [TEXT] * (len(piece) + 1) + [COPY] * (len(piece) - 1)
        return ids[: mix.length], labels[: mix.length]

    def _draw(self, mix: Mix) -> Sequence:
        """Draw a random sequence from a mix."""
        if self.rng.random() < mix.copy:
            return self.copying(mix)
        if mix.tasks and self.rng.random() < TASK_SHARE:
            return self.task(mix)
        return self.question_answering(mix)

    def batch(self, mix: Mix, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and labels `(sequences, length)`, int64, padded with the end token and the label -1."""
        rows = [self._draw(mix) for _ in range(max(1, tokens // mix.length))]
        width = max(len(ids) for ids, _ in rows)
        ids = np.full((len(rows), width), self.end, np.int64)
        labels = np.full((len(rows), width), -1, np.int64)
        for i, (row_ids, row_labels) in enumerate(rows):
            ids[i, : len(row_ids)] = row_ids
            labels[i, : len(row_ids)] = row_labels
        return ids, labels


def exact_match(correct: np.ndarray, kinds: np.ndarray) -> float:
    """Return the share of answers whose tokens are all predicted, or NaN if there are no answers."""
    is_exact = []
    for row_correct, row_kinds in zip(correct, kinds):
        is_answer = np.concatenate([[0], row_kinds == ANSWER, [0]])
        bounds = np.flatnonzero(np.diff(is_answer))  # start and stop of each answer in turn
        for start, stop in zip(bounds[::2], bounds[1::2]):
            is_exact.append(row_correct[start:stop].all())
    return float(np.mean(is_exact)) if is_exact else math.nan


class Progress:
    """Progress of a training run, printed every 20 steps and written next to the weights."""

    def __init__(self, seed: int):
        """Start the clock."""
        self.seed, self.steps, self.tokens, self.started = seed, 0, 0, time.time()

    def count(self, labels: np.ndarray) -> None:
        """Count a batch."""
        self.steps += 1
        self.tokens += int((labels >= 0).sum())

    def show(self, mix: Mix, loss: float, exact: float) -> None:
        """Print the progress every 20 steps."""
        if self.steps % 20 == 0:
            minutes = (time.time() - self.started) / 60
            line = f"step {self.steps}, {mix.length} tokens: loss {loss:.4f}, exact {exact:.4f}"
            print(f"{line}, {minutes:.1f} minutes", flush=True)

    def write(self, out: Path, **more: Any) -> None:
        """Write training.json."""
        about = {"seed": self.seed, "steps": self.steps, "tokens": self.tokens, **more}
        (out / "training.json").write_text(json.dumps(about, indent=2) + "\n")
