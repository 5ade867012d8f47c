"""Models that were trained to but a few tokens, and conversations about longer documents."""

import random

import mlx.core as mx
from mlx_lm import load

from mlx_snapkv import Conversation
from mlx_snapkv.demo import MODELS
from mlx_snapkv.demo.questions import is_right, make_haystack

LENGTH = 512


def short_model(name):
    """An embedded model, as if it had been trained to `LENGTH` tokens, and its tokenizer."""
    model, tokenizer = load(str(MODELS[name]), model_config={"max_position_embeddings": LENGTH})
    model.set_dtype(mx.float32)
    return model, tokenizer


def asked(model, tokenizer, n_tokens, n_facts=4, **options):
    """A conversation that was asked for facts of a document, one a turn, and whether it knew them."""
    document, facts = make_haystack(tokenizer, random.Random(3), n_facts, n_tokens)
    conversation = Conversation(model, tokenizer, max_tokens=12, **options)
    conversation.attach(document)
    answers = ["".join(r.text for r in conversation.send(fact.question)) for fact in facts]
    return conversation, [is_right(fact, answer) for fact, answer in zip(facts, answers)]
