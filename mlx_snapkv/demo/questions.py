"""Prompts that ask for a hidden fact, and a check of the answers."""

import random
from collections.abc import Callable

from .documents import Fact, fact_sentence, hide, make_facts


def token_counter(tokenizer) -> Callable[[str], int]:
    """Return a function that counts the tokens in a string, excluding special tokens."""
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))


def make_haystack(
    tokenizer, rng: random.Random, n_facts: int, n_tokens: int
) -> tuple[str, list[Fact]]:
    """Return a document of about `n_tokens` tokens, and the `n_facts` facts hidden in it."""
    facts = make_facts(rng, n_facts)
    sentences = [fact_sentence(fact, rng) for fact in facts]
    document = hide(rng, sentences, n_tokens, token_counter(tokenizer))
    return document, facts


def question_prompt(tokenizer, document: str, question: str) -> list[int]:
    """Render a document and a question with the chat template (thinking disabled), and return the token ids."""
    messages = [{"role": "user", "content": f"{document}\n\n{question}"}]
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, enable_thinking=False
    )


def is_right(fact: Fact, answer: str) -> bool:
    """Return whether an answer starts with the fact's value, with no letter or digit after it."""
    text = answer.strip()
    if not text.startswith(fact.value):
        return False
    next_character = text[len(fact.value) :][:1]  # "" at the end
    return not next_character.isalnum()
