"""Anthropic's endpoints, asked by Anthropic's own client."""

import json
import random
import time

import anthropic
import openai
import pytest
from server_helpers import serving

from mlx_snapkv.demo.questions import make_haystack

TOOL = {
    "name": "open",
    "description": "Opens a door.",
    "input_schema": {"type": "object", "properties": {"door": {"type": "string"}}},
}
CALL = '<tool_call>{"name": "open", "arguments": {"door": "green"}}</tool_call>'
HELLO = [{"role": "user", "content": "The key of"}]


def connect(served, key="any"):
    return anthropic.Anthropic(base_url=served.url, api_key=key, timeout=60, max_retries=0)


@pytest.fixture(scope="module")
def client(served):
    return connect(served)


@pytest.fixture(scope="module")
def obeying(agent):
    return connect(agent)


@pytest.fixture(scope="module")
def document(demo_llama):
    return make_haystack(demo_llama[1], random.Random(11), 6, 1500)


def ask(client, content, **options):
    messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
    given = {"model": "claude-on-this-mac", "messages": messages, "max_tokens": 200}
    return client.messages.create(**given | options)


def text_of(message):
    (block,) = message.content
    assert block.type == "text"
    return block.text


def test_follow_ups_know_what_was_read(client, document):
    text, facts = document
    messages = []
    for i, fact in enumerate(facts[:4]):
        question = fact.question if i else f"{text}\n\n{fact.question}"
        messages.append({"role": "user", "content": question})
        message = ask(client, messages)
        assert text_of(message) == fact.value and message.stop_reason == "end_turn"
        assert message.model == "claude-on-this-mac" and message.role == "assistant"
        counted = client.messages.count_tokens(model="any", messages=messages)
        used = message.usage
        assert counted.input_tokens == used.input_tokens + used.cache_read_input_tokens
        assert used.output_tokens > 1
        messages.append({"role": "assistant", "content": message.content})
    assert used.cache_read_input_tokens > 1400 and used.input_tokens < 200


def test_a_stream_is_the_whole_message_in_events(client, document):
    text, facts = document
    question = f"{text}\n\n{facts[4].question}"
    whole = ask(client, question)
    events = list(ask(client, question, stream=True))
    kinds = [event.type for event in events]
    first, *deltas, end, last, stop = [k for k in kinds if k != "message_start"]
    assert kinds[0] == "message_start" and first == "content_block_start"
    assert set(deltas) == {"content_block_delta"}
    assert (end, last, stop) == ("content_block_stop", "message_delta", "message_stop")
    assert (
        "".join(e.delta.text for e in events if e.type == "content_block_delta") == facts[4].value
    )
    assert events[-2].usage.output_tokens == whole.usage.output_tokens
    given = {"model": "m", "max_tokens": 200, "messages": [{"role": "user", "content": question}]}
    with client.messages.stream(**given) as stream:
        final = stream.get_final_message()
    assert text_of(final) == text_of(whole) == facts[4].value
    assert final.stop_reason == whole.stop_reason == "end_turn"


def test_pings_while_a_long_prompt_is_read(client, demo_llama):
    text, facts = make_haystack(demo_llama[1], random.Random(12), 2, 4500)
    question = [{"role": "user", "content": f"{text}\n\n{facts[0].question}"}]
    given = {"model": "m", "max_tokens": 20, "messages": question, "stream": True}
    with client.messages.with_streaming_response.create(**given) as response:
        lines = [line for line in response.iter_lines() if line.startswith("event: ")]
    first = lines.index("event: content_block_start")
    assert lines[0] == "event: message_start"
    assert lines[1:first] == ["event: ping"] * (first - 1) and first > 4


def test_contents_as_blocks(client, document):
    text, facts = document
    cached = {"cache_control": {"type": "ephemeral"}}
    source = {"type": "text", "media_type": "text/plain", "data": text}
    for first in ({"type": "text", "text": f"{text}\n\n"}, {"type": "document", "source": source}):
        blocks = [first | cached, {"type": "text", "text": facts[5].question}]
        messages = [{"role": "user", "content": blocks}]
        message = ask(client, messages, system=[{"type": "text", "text": "Be brief.", **cached}])
        assert text_of(message) == facts[5].value
    plain = ask(
        client, f"{text}\n\n{facts[5].question}", system="Be brief.", metadata={"user_id": "x"}
    )
    sums = [m.usage.input_tokens + m.usage.cache_read_input_tokens for m in (plain, message)]
    assert sums[0] == sums[1] and plain.usage.cache_read_input_tokens > 1400


def test_stop_sequences_and_sampling(client):
    whole = text_of(ask(client, HELLO, max_tokens=12))
    word = whole.split()[3]
    stopped = ask(client, HELLO, max_tokens=12, stop_sequences=["never said", word])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)
    assert text_of(stopped) == whole[: whole.index(word)]
    assert ask(client, HELLO, max_tokens=2).stop_reason == "max_tokens"
    # No arguments of the client any more.
    chance = {"temperature": 1.0, "top_p": 0.99, "top_k": 500}
    texts = {text_of(ask(client, HELLO, max_tokens=12, extra_body=chance)) for _ in range(6)}
    assert len(texts) > 1


def test_a_billing_header_spoils_no_prefix(client):
    rules = "The garden is behind the house and the harbor is far from it. " * 20
    for number in ("1a", "2b", "3c"):
        header = f"x-anthropic-billing-header: cc_version=2.1.{number}; cch={number};"
        system = [{"type": "text", "text": header}, {"type": "text", "text": rules}]
        used = ask(client, f"Hello {number}", system=system, max_tokens=2).usage
    assert used.cache_read_input_tokens > 100 and used.input_tokens < 60
    as_line = ask(client, "Hello 4d", system=f"{header}\n{rules}", max_tokens=2).usage
    assert as_line.cache_read_input_tokens >= used.cache_read_input_tokens
    with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="any") as other:
        for content in (f"{header}\n{rules}", [{"type": "text", "text": f"{header}\n{rules}"}]):
            messages = [
                {"role": "system", "content": content},
                {"role": "user", "content": "Hello"},
            ]
            used = other.chat.completions.create(model="m", messages=messages, max_tokens=2).usage
            assert used.prompt_tokens_details.cached_tokens > 100
        given = {"model": "m", "input": "Hello", "max_output_tokens": 2}
        used = other.responses.create(instructions=f"{header}\n{rules}", **given).usage
        assert used.input_tokens_details.cached_tokens > 100
    with serving(volatile_headers=()) as keeping:
        kept = connect(keeping).messages.count_tokens
        n, n_plain = (
            kept(model="m", system=system, messages=HELLO).input_tokens
            for system in (f"{header}\n{rules}", rules)
        )
    assert n > n_plain + 20


def test_thoughts_and_tools(obeying):
    said = f"SAY: <think>It is shut.</think>\n\nI open it.\n{CALL}"
    for message in (
        ask(obeying, said, tools=[TOOL]),
        streamed(obeying, said, tools=[TOOL], tool_choice={"type": "auto"}),
    ):
        thought, text, call = message.content
        assert (thought.type, thought.thinking) == ("thinking", "It is shut.")
        assert (text.type, text.text) == ("text", "\n\nI open it.\n")
        assert (call.type, call.name, call.input) == ("tool_use", "open", {"door": "green"})
        assert message.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "SAY: It is open."}
    messages = [
        {"role": "user", "content": said},
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    first = ask(obeying, messages, tools=[TOOL])
    assert text_of(first) == "It is open." and first.stop_reason == "end_turn"
    result["content"] = [{"type": "text", "text": text} for text in ("SAY: It is", "open.")]
    assert text_of(ask(obeying, messages, tools=[TOOL])) == "It is\n\nopen."


def streamed(client, content, **options):
    given = {"model": "m", "max_tokens": 200, "messages": [{"role": "user", "content": content}]}
    with client.messages.stream(**given | options) as stream:
        return stream.get_final_message()


def test_two_calls_are_two_blocks(obeying):
    for message in (
        ask(obeying, f"SAY: {CALL}\n{CALL}", tools=[TOOL]),
        streamed(obeying, f"SAY: {CALL}\n{CALL}", tools=[TOOL]),
    ):
        assert [block.input for block in message.content] == [{"door": "green"}] * 2
        assert len({block.id for block in message.content}) == 2


def n_prompt(agent, **body):
    """Tokens of what the template makes of a body."""
    body = {"messages": [{"role": "user", "content": "hi"}]} | body
    return connect(agent).messages.count_tokens(model="m", **body).input_tokens


def test_tools_and_thoughts_reach_the_template(agent):
    encode = agent.engine.loaded.tokenizer.encode

    def n_tokens(text):
        return len(encode(text, add_special_tokens=False))

    n_plain = n_prompt(agent)
    n_of = {
        "tools": n_prompt(
            agent, tools=[TOOL, {"type": "web_search_20250305", "name": "web_search"}]
        ),
        "none": n_prompt(agent, tools=[TOOL], tool_choice={"type": "none"}),
        "unthinking": n_prompt(agent, thinking={"type": "disabled"}),
    }
    assert n_of["none"] == n_plain
    assert n_of["tools"] == n_plain + n_tokens("[open] ")
    assert n_of["unthinking"] == n_plain + n_tokens("<think></think>")


def test_system_messages_in_the_middle_keep_their_place(agent):
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "system", "content": "There are two helpers."},
    ]
    asked = {"messages": messages, "system": "Be brief."}
    twice = [{"role": "user", "content": "hi\n\nThere are two helpers."}]
    assert n_prompt(agent, **asked) == n_prompt(agent, messages=twice, system="Be brief.")


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
BAD = {
    "an image": ({"messages": [{"role": "user", "content": [IMAGE]}]}, "type must be text"),
    "a role": (
        {"messages": [{"role": "wizard", "content": "hi"}]},
        "messages.0 can't be read: its role must be user",
    ),
    "nothing said": ({"messages": [{"role": "user", "content": []}]}, "content must not be empty"),
    "no messages": ({"messages": []}, "messages must not be empty"),
    "a prefill": ({"messages": [*HELLO, {"role": "assistant", "content": "a"}]}, "none can be"),
    "a text that is none": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
        "messages.0.content.0.text should be a valid string",
    ),
    "max_tokens": ({"max_tokens": 0}, "max_tokens should be greater"),
    "temperature": ({"temperature": 1.5}, "temperature should be less"),
    "top_k": ({"top_k": 10**6}, "top_k must be below"),
    "stops": ({"stop_sequences": [1]}, "stop_sequences.0"),
    "a forced tool": ({"tool_choice": {"type": "tool", "name": "open"}}, "no tool can be forced"),
    "any tool": ({"tool_choice": {"type": "any"}}, "tool_choice: type must be auto or none"),
    "no schema": ({"tools": [{"name": "open"}]}, "a name and an input_schema"),
    "no object": ({"tools": [{"name": "open", "input_schema": {"type": "array"}}]}, "of an object"),
    "tools for this model": ({"tools": [TOOL]}, "takes no tools"),
    "a form": ({"extra_body": {"output_config": {"format": {"type": "x"}}}}, "can't force a form"),
    "thinking": ({"thinking": {"type": "loud"}}, "thinking.type should be"),
    "system": ({"system": [IMAGE]}, "system.0.type should be"),
    "half a pair": ({"system": "\ud800"}, "not UTF-8"),
}


@pytest.mark.parametrize("name", BAD)
def test_mistakes_are_the_clients_own_exceptions(client, name):
    body, told = BAD[name]
    content = json.dumps({"max_tokens": 5, "messages": HELLO, **body.get("extra_body", body)})
    options = {"extra_headers": {"content-type": "application/json"}}
    with pytest.raises(anthropic.BadRequestError, match=told) as caught:
        client.post("/v1/messages", cast_to=object, content=content.encode(), options=options)
    error = caught.value.body
    assert error["type"] == "error" and set(error) == {"type", "error"}
    assert error["error"]["type"] == "invalid_request_error"
    assert text_of(ask(client, HELLO, max_tokens=4))


def test_other_refusals(client):
    with pytest.raises(anthropic.NotFoundError, match="no GET /v1/messages/batches"):
        client.messages.batches.list()
    options = {"Host": "evil.example"}
    with pytest.raises(anthropic.PermissionDeniedError, match="which this server is not"):
        ask(client, HELLO, extra_headers=options)
    with serving(api_key="secret") as locked:
        with pytest.raises(anthropic.AuthenticationError) as caught:
            ask(connect(locked, "wrong"), HELLO)
        assert caught.value.body["error"]["type"] == "authentication_error"
        assert ask(connect(locked, "secret"), HELLO, max_tokens=2).content


def test_nested_inputs_are_refused_or_told(served):
    for depth in (50, 600, 900, 940, 980, 1200):
        deep = '{"a":' * depth + "1" + "}" * depth
        call = f'{{"type": "tool_use", "id": "a", "name": "b", "input": {deep}}}'
        body = f"""{{"max_tokens": 4, "messages": [{{"role": "user", "content": "The key"}},
            {{"role": "assistant", "content": [{call}]}}, {{"role": "user", "content": "of"}}]}}"""
        response = served.client.post("/v1/messages", content=body.encode())
        assert response.status_code == 200 or response.json()["type"] == "error"
        assert response.status_code < 500, (depth, response.text)


def test_counting_ends_with_the_server():
    with serving() as ending:
        client = connect(ending)
        assert client.messages.count_tokens(model="m", messages=HELLO).input_tokens > 2
        ending.engine.stop_and_join()
        with pytest.raises(anthropic.InternalServerError, match="shutting down") as caught:
            client.messages.count_tokens(model="m", messages=HELLO)
        assert caught.value.body["error"]["type"] == "overloaded_error"
        assert ending.metric("mlx_snapkv_open_requests") == 0


def test_a_count_that_does_not_come_is_given_up(monkeypatch):
    with serving(timeout=0.5) as slow:
        monkeypatch.setattr(slow.engine, "_take", lambda *given: time.sleep(2))
        with pytest.raises(anthropic.APIStatusError, match="not answered within") as caught:
            connect(slow).messages.count_tokens(model="m", messages=HELLO)
        assert caught.value.status_code == 408
