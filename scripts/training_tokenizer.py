"""Train the built-in models' tokenizer: a byte-level BPE in which every digit is a token."""

import random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from mlx_snapkv.demo import documents

VOCAB_SIZE = 1536
BOS, END = "<|bos|>", "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")


def _corpus(rng: random.Random, sentences: int = 60_000):
    for i in range(sentences):
        if i % 3 == 0:
            fact = documents.make_facts(rng, 1, invented_share=0.1)[0]
            yield documents.fact_sentence(fact, rng) + "\n\n" + fact.question
        else:
            yield " " + documents.filler_sentence(rng)


def train_tokenizer(seed: int) -> Tokenizer:
    """Train a tokenizer on random sentences."""
    tokenizer = Tokenizer(models.BPE())
    # Each digit is a token, together with a leading space: " 482" is [" 4", "8", "2"]. The token before a value
    # therefore predicts the first digit.
    pieces = Regex(r" ?\d| ?[A-Za-z]+| ?[^\sA-Za-z\d]|\s")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pieces, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, END, *ROLES],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(random.Random(seed)), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer
