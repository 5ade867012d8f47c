"""Of several ranks each decides alone when an answer ends: all by the same text."""

import json
from dataclasses import replace

from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import AutoTokenizer

from mlx_snapkv.completions.answer import Completion
from mlx_snapkv.completions.body import CHAT, parse
from mlx_snapkv.completions.request import Defaults, completion_request
from mlx_snapkv.demo import MODELS
from mlx_snapkv.server.rank_messages import received, sent
from mlx_snapkv.server.requests import EngineRequest


def test_a_stop_text_in_a_thought_ends_it_on_no_rank():
    tokenizer = AutoTokenizer.from_pretrained(MODELS["demo"])
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer = TokenizerWrapper(tokenizer)
    body = parse(CHAT, {"messages": [{"role": "user", "content": "Why?"}], "stop": "cold"})

    def prepare(request):
        request.completion_request = completion_request(request.body, tokenizer, Defaults())

    request = EngineRequest(body)
    prepare(request)
    request.completion_request = replace(request.completion_request, state="reasoning")
    other = received(json.loads(json.dumps(sent(request))), prepare)
    assert (other.number, other.seed) == (request.number, request.seed)
    text = "It was cold.</think>The road was cold. It was green."
    ends = []
    for each in (request, other):
        answer, tokens = Completion(each.completion_request, tokenizer), tokenizer.encode(text)
        for token in tokens:
            if answer.finish_reason is None:
                answer.add(token, None)
        ends.append((answer.n_tokens, answer.stopped_by, answer.reply))
        assert answer.n_tokens < len(tokens) and answer.reply.text == "The road was "
    assert ends[0] == ends[1]


def test_a_prefill_is_the_same_on_every_rank(demo_llama):
    tokenizer = demo_llama[1]
    messages = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": '{"a":'}]
    body = parse(CHAT, {"messages": messages, "response_format": {"type": "json_object"}})

    def prepare(request):
        request.completion_request = completion_request(
            request.body, tokenizer, Defaults(), form=request.form
        )

    request = EngineRequest(body)
    prepare(request)
    other = received(json.loads(json.dumps(sent(request))), prepare).completion_request
    assert other.prompt == request.completion_request.prompt
    for each in (request.completion_request, other):
        assert each.prefill == each.constraint.form.begun == '{"a":'
        answer = Completion(each, tokenizer)
        for token in tokenizer.encode(" 5}", add_special_tokens=False):
            answer.add(token, None)
        assert answer.reply.text == " 5}"
