"""The real language models assign a high likelihood to an essay, and their tokens decode to its text."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.tokenizer_utils import load
from real_models import LARGER, MODELS, essay, real_folder, real_model

TEXT = "In 2024, 1,234 people\n\n\n  paid $5.99 — naïve 日本語 🎉\tx  y   z\n<b>"


@pytest.mark.parametrize("name, most", [("smollm2-135m-instruct", 21), ("gemma-3-270m", 17)])
def test_the_perplexity_of_an_essay_is_low(name, most):
    model, tokenizer = real_model(name)
    tokens = mx.array(tokenizer.encode(essay("wisdom")[:4000])[:256])
    losses = nn.losses.cross_entropy(model(tokens[None, :-1])[0], tokens[1:])
    assert mx.exp(losses.mean()).item() < most


@pytest.mark.parametrize("name", [*MODELS, LARGER])
def test_tokens_decode_to_the_text(name):
    tokenizer = load(real_folder(name))
    text = TEXT + tokenizer.eos_token
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(tokens) == text and tokens[-1] in tokenizer.eos_token_ids
    detokenizer = tokenizer.detokenizer
    for token in tokens[:-1]:
        detokenizer.add_token(token)
    detokenizer.finalize()
    assert detokenizer.text == TEXT
