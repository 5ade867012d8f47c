"""Prompt tokens: a conversation tokenises only new text, and several prompts may share a prefix."""

import copy
import json
import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper, load
from real_models import LARGER, real_folder
from real_models import MODELS as REAL
from tokenizers import AddedToken, Tokenizer

from mlx_snapkv import Conversation, SnapKVError, generate
from mlx_snapkv.chat.prompts import Rendering, mlx_lm_suffix
from mlx_snapkv.demo import MODELS
from mlx_snapkv.engine.token_ids import common_prefix

GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# Texts that touch or overlap the template's own tokens.
ODD = [*"<|im_end|> <|end|> <end_of_turn> <bos> <| a<|user|> ▁▁ \u0338".split(), "\n\n", "  "]
TEXTS = st.lists(st.one_of(st.sampled_from(ODD), st.text(max_size=6)), max_size=6).map("".join)
AWKWARD = {
    "overlapped": AddedToken("a<|us", normalized=False),
    "contained": AddedToken("a<|end|>b", normalized=False),
    "longer": AddedToken("<|end|>b", normalized=False),
}


@pytest.fixture(scope="module", params=["demo", *REAL, LARGER])
def tokenizer(request):
    name = request.param
    tokenizer = load(MODELS[name] if name in MODELS else real_folder(name))
    if not tokenizer.has_chat_template:
        tokenizer.chat_template, tokenizer.has_chat_template = GEMMA, True
    return tokenizer


def require_equal(tokenizer, chats):
    """Assert that after every turn, a chat's tokens equal those of its whole text tokenised at once."""
    render, roles = Rendering(tokenizer), ("user", "assistant")
    for chat in chats:
        for n in range(1, len(chat) + 1):
            messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(chat[:n])]
            options = {"add_generation_prompt": n % 2 == 1}
            assert render(messages, **options) == tokenizer.apply_chat_template(messages, **options)


@settings(max_examples=60)
@given(chats=st.lists(st.lists(TEXTS, min_size=1, max_size=4), min_size=1, max_size=3))
def test_a_conversations_tokens_equal_the_tokens_of_its_whole_text(tokenizer, chats):
    require_equal(tokenizer, chats)


@pytest.mark.parametrize("how", [*AWKWARD, "lstrip", "rstrip", "single_word"])
def test_text_is_not_split_at_tokens_that_depend_on_their_neighbours(how):
    tokenizer = load(MODELS["demo"])
    tokenizer.chat_template = "{% for m in messages %}. <|user|> {{ m.content }}<|end|>{% endfor %}"
    inner = tokenizer._tokenizer
    if how in AWKWARD:
        inner.add_tokens([AWKWARD[how]])
    else:
        parts = json.loads(inner.backend_tokenizer.to_str())
        for token in parts["added_tokens"]:
            token[how] = True
        inner._tokenizer = Tokenizer.from_str(json.dumps(parts))
    require_equal(
        tokenizer, [["a", "b", "b"], ["a  ", "b"], ["a  <|user|> a<|user|> ", "a<|end|>b"]]
    )


def test_a_long_text_is_tokenised_once(tokenizer, monkeypatch):
    lengths, kind = [], type(tokenizer._tokenizer)
    encode = kind._encode_plus

    def spied(self, text, *args, **kwargs):
        lengths.append(len(text))
        return encode(self, text, *args, **kwargs)

    monkeypatch.setattr(kind, "_encode_plus", spied)
    render, messages = Rendering(tokenizer), [{"role": "user", "content": "one two " * 500}]
    render(messages, add_generation_prompt=True)
    assert max(lengths) > 4000
    for text in ("three", "four"):
        lengths.clear()
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "five"}]
        render(messages, add_generation_prompt=True)
        assert 0 < max(lengths) < 100


@pytest.mark.parametrize(
    ("prompts", "shared"),
    [([[1, 2, 3], [1, 2, 4], [1, 2, 3]], 2), ([[1, 2, 3], [1, 2]], 2), ([[], [2]], 0), ([[5]], 1)],
)
def test_the_common_prefix_ends_before_the_first_difference(prompts, shared):
    assert common_prefix(prompts) == shared


def test_a_template_that_fails_is_one_sentence(demo_llama):
    class Refusing:
        has_chat_template = True

        def apply_chat_template(self, messages, **options):
            raise ValueError("no")

    chat = Conversation(demo_llama[0], Refusing())
    with pytest.raises(SnapKVError, match="the chat template or tokenizer failed: ValueError: no"):
        chat.send("What?")


def test_without_a_template_no_second_bos_is_inserted(demo_llama):
    _, tokenizer = demo_llama
    assert tokenizer.bos_token_id not in mlx_lm_suffix(tokenizer, "Why?", True)


def test_transformers_does_not_warn_of_a_text_beyond_the_tokenizers_limit(demo_llama, caplog):
    """The commands' loader silences transformers. mlx-lm's loader, which scripts use, does not."""
    model, loaded = demo_llama
    said = logging.getLogger("transformers.tokenization_utils_base")
    caplog.set_level(logging.WARNING, said.name)
    said.addHandler(caplog.handler)
    text = "word " * 100
    try:
        for use in (
            lambda tokenizer: list(Conversation(model, tokenizer, max_tokens=1).send(text)),
            lambda tokenizer: generate(model, tokenizer, text, max_tokens=1),
        ):
            hf = copy.deepcopy(loaded._tokenizer)
            hf.model_max_length, hf.deprecation_warnings = 50, {}
            use(TokenizerWrapper(hf))
    finally:
        said.removeHandler(caplog.handler)
    assert not caplog.messages
