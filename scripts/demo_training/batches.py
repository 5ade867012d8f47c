"""Training sequences: question answering over documents, and copying.

Every sequence is a list of token ids with a parallel list of labels: 0 for ordinary text, 1 for the
tokens of an answer, 2 for the repeat of a copied segment.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from mlx_snapkv.demo import documents

from .tokenizer import BOS, END, ROLES

TEXT, ANSWER, COPY = 0, 1, 2

# Share of documents whose facts differ in their subject alone, so that the subject must be matched.
SAME_ATTRIBUTE = 0.5


@dataclass
class Mix:
    """What a batch is made of.

    length: tokens a sequence; facts: facts per 1,000 tokens (at least 2); questions: asked at most;
    copy: share of copying sequences; made_up: chance that a word of a subject is an invented one.
    """

    length: int
    facts: float
    questions: int = 12
    copy: float = 0.05
    made_up: float = 0.15


class SequenceMaker:
    def __init__(self, tokenizer: Tokenizer, seed: int):
        self.rng = random.Random(seed)
        self.tokenizer = tokenizer
        self.bos, self.end = tokenizer.token_to_id(BOS), tokenizer.token_to_id(END)
        self.system, self.user, self.assistant = (tokenizer.token_to_id(role) for role in ROLES)
        self.n_special = 2 + len(ROLES)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def count(self, text: str) -> int:
        return len(self.encode(text))

    def question_answering(self, mix: Mix) -> tuple[list[int], list[int]]:
        rng = self.rng
        n_facts = max(2, round(mix.facts * mix.length / 1000 * rng.uniform(0.5, 1.5)))
        attributes = list(documents.ATTRIBUTES)
        if rng.random() < SAME_ATTRIBUTE:
            attributes = [rng.choice(attributes)]
        facts = documents.make_facts(rng, n_facts, mix.made_up, attributes)
        asked = rng.sample(facts, min(n_facts, mix.questions))
        tail: list[int] = []
        labels: list[int] = []

        def add(ids: list[int], label: int = TEXT) -> None:
            tail.extend(ids)
            labels.extend([label] * len(ids))

        chat = rng.random() < 0.6
        for i, fact in enumerate(asked):
            answer = self.encode(" " + fact.value)
            if chat:
                separator = self.encode("\n\n") if i == 0 else [self.user]
                add(separator + self.encode(fact.question) + [self.assistant])
                add([*answer, self.end], ANSWER)
            else:
                add(self.encode(("\n\n" if i == 0 else "\n") + fact.lead))
                add([*answer, *self.encode(".")], ANSWER)
            if len(tail) > mix.length // 2:
                break
        head = [self.bos]
        if chat:
            if rng.random() < 0.1:
                head += [self.system, *self.encode("Answer the question about the document.")]
            head.append(self.user)
        budget = mix.length - len(tail) - len(head)
        body = self.encode(documents.make_document(rng, facts, max(budget, 0), self.count))
        ids = head + body + tail
        return ids, [TEXT] * (len(head) + len(body)) + labels

    def copying(self, mix: Mix) -> tuple[list[int], list[int]]:
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

    def batch(self, mix: Mix, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """ids and labels, `(sequences, length)` int64, padded with the end token, labelled -1."""
        rows = []
        for _ in range(max(1, tokens // mix.length)):
            make = self.copying if self.rng.random() < mix.copy else self.question_answering
            rows.append(make(mix))
        width = max(len(ids) for ids, _ in rows)
        ids = np.full((len(rows), width), self.end, np.int64)
        labels = np.full((len(rows), width), -1, np.int64)
        for i, (row_ids, row_labels) in enumerate(rows):
            ids[i, : len(row_ids)] = row_ids
            labels[i, : len(row_ids)] = row_labels
        return ids, labels
