"""OpenAI's Completions and Chat Completions APIs, called by OpenAI's own client."""

import json
import logging

import numpy as np
import openai
import pytest
from server_helpers import POLICY, connected, load_named, serving

from mlx_snapkv import Sparse, generate

COMPLETION = {"model": "m", "prompt": "The key of", "max_tokens": 12}


def connect(served):
    return connected(openai.OpenAI, served, "/v1")


@pytest.fixture(scope="module")
def client(served):
    return connect(served)


def chat(client, text, **options):
    given = {"model": "gpt-4o", "messages": [{"role": "user", "content": text}], "max_tokens": 20}
    return client.chat.completions.create(**given | options)


def test_a_stream_is_the_whole_answer_in_parts(client, document):
    text, facts = document
    question = f"{text}\n\n{facts[0].question}"
    whole = chat(client, question, logprobs=True, top_logprobs=2)
    assert whole.model == "gpt-4o" and whole.choices[0].message.content == facts[0].value
    about, used = whole.model_extra["mlx_snapkv"], whole.usage
    assert 0 < about["kv_bytes_after"] < 0.3 * about["kv_bytes_before"]
    assert "kv_bytes_staying" not in about  # a field for sparse attention only
    assert used.total_tokens - used.completion_tokens == used.prompt_tokens > 1400
    options = {"logprobs": True, "top_logprobs": 2, "stream_options": {"include_usage": True}}
    *chunks, last = list(chat(client, question, stream=True, **options))
    choices = [chunk.choices[0] for chunk in chunks]
    assert "".join(choice.delta.content or "" for choice in choices) == facts[0].value
    assert choices[0].delta.role == "assistant" and choices[-1].finish_reason == "stop"
    assert last.choices == [] and last.usage.completion_tokens == whole.usage.completion_tokens
    streamed = [token for choice in choices if choice.logprobs for token in choice.logprobs.content]
    tokens = whole.choices[0].logprobs.content
    assert [t.token for t in streamed] == [t.token for t in tokens]
    assert len(tokens) == whole.usage.completion_tokens
    assert all(len(t.top_logprobs) == 2 and t.logprob <= 0 for t in tokens)


def test_tool_calls_whole_and_streamed(agent):
    tool = {"type": "function", "function": {"name": "open", "parameters": {"type": "object"}}}
    call = '<tool_call>{"name": "open", "arguments": {"door": "green"}}</tool_call>'
    said = f"SAY: <think>It is shut.</think>{call}\n{call}"
    options = {"tools": [tool], "max_tokens": 200}
    (choice,) = chat(connect(agent), said, **options).choices
    assert choice.finish_reason == "tool_calls" and choice.message.reasoning == "It is shut."
    assert [c.function.arguments for c in choice.message.tool_calls] == ['{"door": "green"}'] * 2
    chunks = chat(connect(agent), said, stream=True, **options)
    calls = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or []]
    assert [c.index for c in calls] == [0, 1] and len({c.id for c in calls}) == 2


SCHEMA = {
    "type": "object",
    "properties": {"door": {"enum": ["green", "red"]}, "keys": {"type": "array", "maxItems": 2}},
    "required": ["door", "keys"],
    "additionalProperties": False,
}
AS_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}


def test_whole_and_streamed_answers_obey_a_schema_with_several_choices(client):
    how = {"max_tokens": 60, "temperature": 1.0, "seed": 4, "n": 3, "response_format": AS_SCHEMA}
    whole = chat(client, "Which door?", **how, logprobs=True, top_logprobs=5)
    texts = [choice.message.content for choice in whole.choices]
    for text in texts:
        found = json.loads(text)
        assert found["door"] in ("green", "red") and len(found["keys"]) <= 2
    tokens = whole.choices[0].logprobs.content
    assert all(top.logprob <= 0 for t in tokens for top in t.top_logprobs)
    # Tokens that the schema forbids are not listed.
    assert min(len(t.top_logprobs) for t in tokens) == 1
    streamed = ["", "", ""]
    for chunk in chat(client, "Which door?", **how, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts
    with pytest.raises(openai.BadRequestError, match="max_tokens=2 is too few for JSON that obeys"):
        chat(client, "x", max_tokens=2, response_format=AS_SCHEMA)


def test_thoughts_are_free_and_the_answer_after_them_obeys_the_schema(agent):
    said = 'SAY: <think>It is {shut}.</think>\n\n{"door": "green","keys": []}'
    (choice,) = chat(connect(agent), said, max_tokens=200, response_format=AS_SCHEMA).choices
    assert choice.message.reasoning == "It is {shut}." and choice.finish_reason == "stop"
    assert json.loads(choice.message.content) == {"door": "green", "keys": []}
    with pytest.raises(openai.APIError):  # the answer that is asked for is not JSON
        chat(connect(agent), "SAY: The door.", max_tokens=200, response_format=AS_SCHEMA)


DOORS = {
    "type": "object",
    "properties": {"door": SCHEMA["properties"]["door"]},
    "required": ["door"],
}
OPEN = {"type": "function", "function": {"name": "open", "parameters": DOORS}}
SHUT = {"type": "function", "function": {"name": "shut"}}


def test_a_forced_call(agent):
    tools = {"tools": [SHUT, OPEN], "max_tokens": 200}
    client, only_open = connect(agent), {"type": "function", "function": {"name": "open"}}
    said = 'SAY: <think>Which?</think>\n\n<tool_call>{"name": "open", "arguments": {"door": "red"}}</tool_call>'
    for choice in ("required", only_open):
        (found,) = chat(client, said, tool_choice=choice, **tools).choices
        (call,) = found.message.tool_calls
        assert found.finish_reason == "tool_calls" and found.message.reasoning == "Which?"
        assert (call.function.name, call.function.arguments) == ("open", '{"door": "red"}')
    # A response format constrains only text; the model may still call tools.
    (found,) = chat(client, said, response_format=AS_SCHEMA, **tools).choices
    assert [c.function.name for c in found.message.tool_calls] == ["open"]
    said = 'SAY: <think>Which?</think>\n\n{"door": "green","keys": []}'
    (found,) = chat(client, said, response_format=AS_SCHEMA, **tools).choices
    assert json.loads(found.message.content)["door"] == "green"


def assert_offsets(text, tokens, offsets):
    assert offsets[0] == 0 and len(tokens) == len(offsets)
    assert all(text.startswith(token, start) for token, start in zip(tokens, offsets))


def test_completions_of_texts_and_of_tokens(client, demo_llama):
    response = client.completions.create(**COMPLETION, logprobs=2)
    (choice,) = response.choices
    assert choice.text.strip() == generate(*demo_llama, "The key of", max_tokens=12)
    logprobs = choice.logprobs
    assert len(logprobs.token_logprobs) == 12 == response.usage.completion_tokens
    assert_offsets(choice.text, logprobs.tokens, logprobs.text_offset)
    chunks = [
        chunk.choices[0]
        for chunk in client.completions.create(**COMPLETION, logprobs=2, stream=True)
    ]
    parts = [chunk.logprobs for chunk in chunks if chunk.logprobs]
    assert [n for part in parts for n in part.text_offset] == logprobs.text_offset
    tokens = COMPLETION | {"prompt": demo_llama[1].encode("The key of")}
    assert client.completions.create(**tokens).choices[0].text == choice.text


def test_a_seed_of_minus_one_is_random(client):
    given = COMPLETION | {"temperature": 1.0, "seed": -1}
    texts = {client.completions.create(**given).choices[0].text for _ in range(4)}
    assert len(texts) > 1


def test_several_choices_seeds_and_stop_texts(client):
    given = COMPLETION | {"temperature": 1.0, "seed": 5, "n": 3}
    first, second = (client.completions.create(**given) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in second.choices] and len(set(texts)) > 1
    assert first.choices[2].index == 2 and first.usage.completion_tokens > 12
    streamed = ["", "", ""]
    for chunk in client.completions.create(**given, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts
    greedy = client.completions.create(**COMPLETION).choices[0]
    stop = greedy.text.split()[2]
    stopped = client.completions.create(**COMPLETION, stop=[stop]).choices[0]
    assert stopped.text == greedy.text[: greedy.text.index(stop)]
    assert (stopped.finish_reason, greedy.finish_reason) == ("stop", "length")


def test_model_names_and_mistakes(client):
    assert [model.id for model in client.models.list()] == ["demo"]
    other = client.models.retrieve("org/other-name")
    assert other.id == "org/other-name" and other.context_length == other.max_model_len > 1000
    assert other.created == client.models.retrieve("demo").created > 1_700_000_000
    with pytest.raises(openai.BadRequestError, match="temperature should be"):
        chat(client, "hi", temperature=-1)
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, "hi", extra_body={"top_k": 10**6})
    assert refused.value.param == "top_k"
    with pytest.raises(openai.NotFoundError, match="GET /v1/files"):
        client.files.list()


def test_full_cache_true_answers_from_all_entries(demo_llama):
    body = {"prompt": "The key of the door is here. " * 60, "max_tokens": 12}
    bodies = body, body | {"full_cache": True}, body
    tiny = POLICY.replace("25%", "64").replace("32,min", "16,min")
    with serving(policy=tiny) as served:
        first, full, again = (served.post("/v1/completions", each).json() for each in bodies)
    assert full["choices"][0]["text"].strip() == generate(*demo_llama, **body)
    assert first["mlx_snapkv"]["entries"] == again["mlx_snapkv"]["entries"] == 64
    assert full["mlx_snapkv"]["entries"] is None
    assert full["mlx_snapkv"]["reason"] == "the full cache was asked for"
    assert first["choices"][0]["text"] == again["choices"][0]["text"]
    for each in (full, again):
        n_known = each["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert n_known > 300


@pytest.mark.parametrize("store", ["memory", "8bit"])
def test_full_cache_true_does_not_use_entries_of_sparse_attention(demo_llama, store):
    body = {"prompt": "The key of the door is here. " * 60, "max_tokens": 12}
    policy = Sparse(budget=64, n_window=16, store=store)
    with serving(policy=policy) as served:
        sparse, full, again = (
            served.post("/v1/completions", each).json()
            for each in (body, body | {"full_cache": True}, body)
        )
    assert full["choices"][0]["text"].strip() == generate(*demo_llama, **body)
    assert full["mlx_snapkv"]["entries"] is None
    assert [
        each["usage"]["prompt_tokens_details"]["cached_tokens"] > 300
        for each in (sparse, full, again)
    ] == [False, False, True]


def test_a_prompt_that_fits_the_budget_does_not_use_quantised_entries(demo_llama):
    text = "The key of the amber door is here, and the lamp of the quiet harbour is there. " * 30
    short = {"prompt": text[: len(text) // 2], "max_tokens": 12}
    with serving(policy=Sparse(budget=400, n_window=16, store="8bit")) as served:
        long = served.post("/v1/completions", short | {"prompt": text}).json()
        after = served.post("/v1/completions", short).json()
    assert long["mlx_snapkv"]["entries"] == 400 and after["mlx_snapkv"]["entries"] is None
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert after["choices"][0]["text"].strip() == generate(*demo_llama, **short)


def test_a_prompt_that_fits_the_budget_shares_only_what_was_read_in_full():
    """Later chunks of a longer prompt were read sparsely, so only its first chunks are shared."""
    text = "The key of the amber door is here, and the lamp of the quiet harbour is there. " * 110
    short = {"prompt": text[: len(text) * 3 // 4], "max_tokens": 4, "logprobs": 1}
    policy = Sparse(budget=2000, n_window=500, read_top_k=16)
    with serving(policy=policy) as served:
        alone = served.post("/v1/completions", short).json()
    with serving(policy=policy) as served:
        long = served.post("/v1/completions", short | {"prompt": text}).json()
        after = served.post("/v1/completions", short).json()
    assert long["mlx_snapkv"]["entries"] == 2000 and after["mlx_snapkv"]["entries"] is None
    assert 500 < after["usage"]["prompt_tokens_details"]["cached_tokens"] < 1000
    found, wanted = (x["choices"][0]["logprobs"]["token_logprobs"] for x in (after, alone))
    assert np.allclose(found, wanted, atol=1e-4)


def test_an_answer_is_no_longer_than_the_model_was_trained_to(served, demo_llama):
    body = {"prompt": "The key of", "max_tokens": 10**20, "timeout": 30}
    # The answer must not end before the test looks at the request.
    body["logit_bias"] = {str(token): -100 for token in demo_llama[1].eos_token_ids}
    with served.client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        assert response.status_code == 200 and next(response.iter_lines())
        (request,) = served.engine.batch.running.values()
        assert request.completion_request.max_tokens == 16384


def test_a_prompt_beyond_the_trained_length_is_answered_with_one_line_in_the_log(caplog):
    def shorten(model, tokenizer):
        model.args.max_position_embeddings = 600

    with serving(load_named("demo", shorten)) as served:
        for n in (5, 700, 750):  # the prompts of a conversation grow
            body = {"prompt": [5 + i % 60 for i in range(n)], "max_tokens": 1}
            assert served.post("/v1/completions", body).status_code == 200
    # Another test may have set the logger to INFO, so that requests are logged, too.
    (told,) = [log.getMessage() for log in caplog.records if log.levelno >= logging.WARNING]
    assert told.startswith("700 tokens are more than the model's trained length of 600")
