"""Tokens and their positions in the text, and splitting a text into sentences."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mlx_snapkv.measure.sentences import rank_sentences, special_tokens, token_spans


@given(text=st.text(max_size=60))
@example(text="naïve 日本語 👩‍🚀, 🇺🇦\u0301 – \u200f \ufffd\ufffd\ufffd\ufffd\ufffd\ufffd")
@example(text="")
def test_spans_cover_the_text_piece_by_piece(demo_llama, text):
    _, tokenizer = demo_llama
    tokens = tokenizer.encode(text)
    whole, spans = token_spans(tokenizer, tokens)
    assert whole == "<|bos|>" + text.encode("utf-8", "replace").decode()
    assert len(spans) == len(tokens)
    assert spans == sorted(spans) and "".join(whole[a:b] for a, b in dict.fromkeys(spans)) == whole
    character = tokenizer.encode("語", add_special_tokens=False)
    assert token_spans(tokenizer, character) == ("語", [(0, 1)] * 3)


def test_incomplete_characters_take_no_other_characters_place(demo_llama):
    """Bytes of incomplete characters are at the end and in the middle."""
    _, tokenizer = demo_llama
    first = tokenizer.encode("語", add_special_tokens=False)[0]
    so, it = (tokenizer.encode(word, add_special_tokens=False) for word in ("so", "it"))
    tokens = [*so, *[first] * 9, *it, first]
    whole, spans = token_spans(tokenizer, tokens)
    assert whole.startswith("so") and "it" in whole and len(spans) == len(tokens)
    assert whole.count("\ufffd") == 10


def _ranked(tokens, kept):
    """Return a text's ranked sentences. Its words are the tokens, and one head chooses the tokens in `kept`."""
    ends = list(itertools.accumulate(map(len, tokens)))
    spans = list(zip([0, *ends], ends))
    row = np.array([t in kept for t in tokens], float)
    ones = np.ones(len(tokens))
    special = np.array([t.startswith("<") for t in tokens])
    return rank_sentences(
        "".join(tokens), spans, special, np.stack([row, ones, row, ones, row]), False
    )


def test_a_templates_text_is_in_no_sentence():
    tokens = "<s>|user|\n|One |two. |Three| four|?|<e>|\n|<s>|assistant|\n".split("|")
    kept = {"user", "two. ", "Three", " four", "<s>", "assistant"}
    found = _ranked(tokens, kept)
    assert [(s.text, s.start, s.stop) for s in found] == [("Three four?", 5, 8), ("One two.", 3, 5)]


@pytest.mark.parametrize(
    "tokens, wanted",
    [
        (["- a", " b\n", "- c", " d\n"], ["- a b", "- c d"]),
        (["# A", "\n", "\n", "Then ", "it\n", "goes on."], ["# A", "Then it\ngoes on."]),
        (["|a|\n", "|-|\n", "|b|"], ["|a|", "|b|"]),
        (["他来了。", "我", "走了。"], ["他来了。", "我走了。"]),
        (["One.", " Two."], ["One.", "Two."]),
    ],
)
def test_lines_of_lists_tables_and_headings_are_separate_sentences(tokens, wanted):
    found = _ranked(tokens, set(tokens))
    assert sorted(s.text for s in found) == sorted(wanted)


def test_a_templates_marks_are_special(demo_llama):
    _, tokenizer = demo_llama
    tokens = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True
    )
    marks = {tokenizer.decode([t]) for t in tokens if t in special_tokens(tokenizer)}
    assert marks == {"<|bos|>", "<|user|>", "<|assistant|>"}
