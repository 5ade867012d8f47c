"""Answers assembled token by token: stop strings, reasoning, tool calls."""

import json

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import json_tools
from transformers import AutoTokenizer

from mlx_snapkv import SnapKVError
from mlx_snapkv.completions.answer import Completion
from mlx_snapkv.completions.answer_body import answer_body
from mlx_snapkv.completions.body import CHAT, COMPLETIONS, Defaults, parse_body
from mlx_snapkv.completions.request import completion_request
from mlx_snapkv.completions.tool_calls import MAX_DEPTH
from mlx_snapkv.demo import MODELS

TOOL = {"type": "function", "function": {"name": "open", "parameters": {"type": "object"}}}
TEMPLATE = """{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{% for m in messages %}{{ m.content }}
{% endfor %}{% if thinks %}<think>{% endif %}"""


@pytest.fixture(scope="module")
def thinking():
    """Return the built-in tokenizer, extended for a model that reasons and calls tools."""
    tokenizer = AutoTokenizer.from_pretrained(MODELS["demo"])
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    tokenizer.chat_template = TEMPLATE
    return TokenizerWrapper(
        tokenizer,
        tool_call_start="<tool_call>",
        tool_call_end="</tool_call>",
        tool_parser=json_tools.parse_tool_call,
    )


def said(tokenizer, text, ends="stop", url=CHAT, **body):
    """Return the choice for an answer's text, and how many tokens were used minus how many there are."""
    asked = {"messages": [{"role": "user", "content": "open the door"}]}
    body = parse_body(url, (asked if url == CHAT else {"prompt": "Look: "}) | body)
    answer = Completion(completion_request(body, tokenizer, Defaults()), tokenizer)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    tokens += [tokenizer.eos_token_id] if ends == "stop" else []
    for i, token in enumerate(tokens):
        answer.add(token, ends if i == len(tokens) - 1 else None)
        if answer.finish_reason:
            break
    (choice,) = answer_body(answer, "m", {})["choices"]
    assert answer_body(answer, "m", {})["usage"]["completion_tokens"] == i + 1
    return choice, i + 1 - len(tokens)


TEXT = "The key is in the drawer. The door is green. It was cold."


@pytest.mark.parametrize("stop", [" green", "r. The d", "T", ["x", "cold", "drawer"]])
def test_a_stop_text_ends_the_answer_wherever_tokens_begin(demo_llama, stop):
    first = min(TEXT.partition(s)[0] for s in ([stop] if isinstance(stop, str) else stop))
    choice, left = said(demo_llama[1], TEXT, stop=stop)
    assert choice["message"]["content"] == first
    assert choice["finish_reason"] == "stop" and left < 0


@pytest.mark.parametrize("ends", ["stop", "length"])
def test_an_unfinished_stop_text_at_the_end_is_text(demo_llama, ends):
    choice, left = said(demo_llama[1], TEXT, ends, stop=["cold. And", "no"])
    assert (choice["message"]["content"], choice["finish_reason"], left) == (TEXT, ends, 0)


def test_thoughts_are_separate_from_the_text(thinking):
    thoughts = dict.fromkeys(("reasoning", "reasoning_content"), "Is it green?")
    choice, _ = said(thinking, "<think>Is it green?</think>It is.")
    assert choice["message"] == {"role": "assistant", "content": "It is.", **thoughts}
    begun = {"chat_template_kwargs": {"thinks": True}}
    choice, _ = said(thinking, "Is it green?</think>It is.", **begun)
    assert choice["message"]["reasoning"] == "Is it green?"
    choice, _ = said(thinking, "Is it green", "length", **begun)
    assert choice["message"]["content"] == "" and choice["finish_reason"] == "length"


def test_text_completions_keep_thoughts_and_calls_as_text(thinking):
    text = "<think>Is it green?</think>It is.<tool_call>open</tool_call>"
    assert said(thinking, text, "length", COMPLETIONS)[0]["text"] == text


def test_a_continued_answer_keeps_its_leading_space(thinking, demo_llama):
    messages = [{"role": "user", "content": "Look."}, {"role": "assistant", "content": "So"}]
    for tokenizer in (thinking, demo_llama[1]):  # they have different detokenizers
        for text in (" it is.", "it is.", "  it is.", "\nit is.", ""):
            choice, _ = said(tokenizer, text, messages=messages)
            assert choice["message"]["content"] == text


def test_tools_are_called(thinking):
    call = '<tool_call>{"name": "open", "arguments": {"door": "green"}}</tool_call>'
    choice, _ = said(thinking, f"Yes.{call}{call}", tools=[TOOL])
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls" and message["content"] == "Yes."
    for made in message["tool_calls"]:
        assert made["type"] == "function" and made["function"]["name"] == "open"
        assert json.loads(made["function"]["arguments"]) == {"door": "green"}
    assert len({made["id"] for made in message["tool_calls"]}) == 2
    choice, _ = said(thinking, "<tool_call>open it", "length", tools=[TOOL])
    assert choice["message"] == {"role": "assistant", "content": "open it"}
    assert choice["finish_reason"] == "length"


MESSAGES = {"messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    "url, body, words",  # mistakes in files only; tests/server has mistakes that servers refuse, too
    [
        (CHAT, MESSAGES | {"n": 2}, "n is not supported in a file of requests"),
        (CHAT, MESSAGES | {"logprobs": True}, "logprobs is not supported"),
    ],
)
def test_a_mistake_is_a_sentence_that_names_the_field(demo_llama, url, body, words):
    with pytest.raises(SnapKVError, match=words):
        completion_request(parse_body(url, body), demo_llama[1], Defaults())


def test_a_text_of_half_an_emoji_only_is_read_as_a_replacement_character(demo_llama):
    _, tokenizer = demo_llama
    half, whole = (
        completion_request(parse_body(COMPLETIONS, {"prompt": text}), tokenizer, Defaults())
        for text in ("\ud800", "\ufffd")
    )
    assert half.prompt == whole.prompt


def nested_call(depth):
    """Return a call whose arguments are nested `depth` levels deep."""
    lists = "[" * (depth - 1) + "1" + "]" * (depth - 1)
    return f'{{"name": "open", "arguments": {{"a": {lists}}}}}'


def test_a_call_may_be_nested_as_deep_as_the_maximum(thinking):
    choice, _ = said(thinking, f"<tool_call>{nested_call(MAX_DEPTH)}</tool_call>", tools=[TOOL])
    assert len(choice["message"]["tool_calls"]) == 1


@pytest.mark.parametrize("call", ["[" * 1200, nested_call(450), nested_call(MAX_DEPTH + 1)])
def test_a_call_that_is_nested_too_deep_is_text(thinking, call):
    choice, _ = said(thinking, f"<tool_call>{call}</tool_call>", tools=[TOOL])
    assert choice["message"]["content"] == call and "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"
