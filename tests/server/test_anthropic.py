"""Anthropic's endpoints, called by Anthropic's own client."""

import random

import anthropic
import pytest
from server_helpers import connected, serving

from mlx_snapkv.completions.turns import merge_into_turns
from mlx_snapkv.demo.questions import make_haystack
from mlx_snapkv.server.anthropic.messages import MessagesBody

DOOR = {"type": "object", "properties": {"door": {"type": "string"}}}
TOOL = {"name": "open", "input_schema": DOOR}
CALL = '<tool_call>{"name": "open", "arguments": {"door": "green"}}</tool_call>'
HELLO = [{"role": "user", "content": "The key of"}]


@pytest.fixture(scope="module")
def client(served):
    return connected(anthropic.Anthropic, served)


@pytest.fixture(scope="module")
def obeying(agent):
    return connected(anthropic.Anthropic, agent)


def ask(client, content, way="create", **options):
    messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
    given = {"model": "claude-on-this-mac", "messages": messages, "max_tokens": 200}
    return getattr(client.messages, way)(**given | options)


def streamed(client, content, **options):
    with ask(client, content, "stream", **options) as stream:
        return stream.get_final_message()


def text_of(message):
    (block,) = message.content
    assert block.type == "text"
    return block.text


def test_a_stream_is_the_whole_message_in_events(client, document):
    text, facts = document
    question = f"{text}\n\n{facts[4].question}"
    whole, final = ask(client, question), streamed(client, question)
    assert whole.model == "claude-on-this-mac" and whole.role == "assistant"
    used, asked = final.usage, [{"role": "user", "content": question}]
    counted = client.messages.count_tokens(model="any", messages=asked).input_tokens
    assert used.input_tokens + used.cache_read_input_tokens == counted
    # Tokens whose queries vote are read again.
    assert used.cache_read_input_tokens > 1200 and used.input_tokens < 260
    events = list(ask(client, question, stream=True))
    deltas = [event.delta.text for event in events if event.type == "content_block_delta"]
    assert [event.type for event in events] == [
        *("message_start", "content_block_start", *["content_block_delta"] * len(deltas)),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert "".join(deltas) == text_of(final) == text_of(whole) == facts[4].value
    assert events[-2].usage.output_tokens == whole.usage.output_tokens
    assert final.stop_reason == whole.stop_reason == "end_turn"


def test_pings_are_sent_while_a_long_prompt_is_read(client, demo_llama):
    text, _ = make_haystack(demo_llama[1], random.Random(12), 2, 4500)
    way = client.messages.with_streaming_response.create
    given = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 20}
    with way(**given, stream=True) as response:
        lines = [line for line in response.iter_lines() if line.startswith("event: ")]
    first = lines.index("event: content_block_start")
    assert lines[:first] == ["event: message_start", *["event: ping"] * (first - 1)] and first > 4


def test_contents_may_be_blocks(client, document):
    text, facts = document
    cached = {"cache_control": {"type": "ephemeral"}}
    source = {"type": "text", "media_type": "text/plain", "data": text}
    question = {"type": "text", "text": facts[5].question}
    brief = [{"type": "text", "text": "Be brief.", **cached}]
    as_one = [{"role": "user", "content": f"{text}\n\n{facts[5].question}"}]
    n = n_prompt(client, messages=as_one, system="Be brief.", metadata={"user_id": "x"})
    for first in ({"type": "text", "text": f"{text}\n\n"}, {"type": "document", "source": source}):
        messages = [{"role": "user", "content": [first | cached, question]}]
        assert n_prompt(client, messages=messages, system=brief) == n
    assert text_of(ask(client, messages, system=brief)) == facts[5].value


def test_stop_sequences_and_sampling(client):
    whole = text_of(ask(client, HELLO, max_tokens=12))
    word = whole.split()[3]
    stopped = ask(client, HELLO, max_tokens=12, stop_sequences=["never said", word])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)
    assert text_of(stopped) == whole[: whole.index(word)]
    assert ask(client, HELLO, max_tokens=2).stop_reason == "max_tokens"
    sampling = {"temperature": 1.0, "top_p": 0.99, "top_k": 500}
    texts = {text_of(ask(client, HELLO, max_tokens=12, extra_body=sampling)) for _ in range(6)}
    assert len(texts) > 1


def test_a_billing_header_that_changes_does_not_spoil_prefixes(client):
    rules = "The garden is behind the house and the harbor is far from it. " * 20
    header = "x-anthropic-billing-header: cc_version=2.1.{0}; cch={0};"
    for number in ("1a", "2b"):
        system = [{"type": "text", "text": text} for text in (header.format(number), rules)]
        used = ask(client, f"Hello {number}", system=system, max_tokens=2).usage
    assert used.cache_read_input_tokens > 100 and used.input_tokens < 60
    with serving(volatile_headers=()) as served:
        keeping = connected(anthropic.Anthropic, served)
        kept, plain = (n_prompt(keeping, system=text) for text in (system, rules))
    assert kept > plain + 20


def n_prompt(client, **body):
    """Return the number of tokens in the prompt that the template makes of a body."""
    body = {"messages": [{"role": "user", "content": "hi"}]} | body
    return client.messages.count_tokens(model="m", extra_body=body, messages=[]).input_tokens


def test_reasoning_and_tools(obeying):
    said = f"SAY: <think>It is shut.</think>\n\nI open it.\n{CALL}\n{CALL}"
    for message in (
        ask(obeying, said, tools=[TOOL]),
        streamed(obeying, said, tools=[TOOL], tool_choice={"type": "auto"}),
    ):
        thought, text, *calls = message.content
        assert (thought.type, thought.thinking) == ("thinking", "It is shut.")
        assert (text.type, text.text) == ("text", "\n\nI open it.\n")
        assert [(c.type, c.name) for c in calls] == [("tool_use", "open")] * 2
        assert [c.input for c in calls] == [{"door": "green"}] * 2
        assert calls[0].id != calls[1].id and message.stop_reason == "tool_use"
    results = [{"type": "tool_result", "tool_use_id": call.id} for call in calls]
    results[1]["content"] = [{"type": "text", "text": t} for t in ("SAY: It is", "open.")]
    messages = [
        {"role": "user", "content": said},
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": results},
    ]
    assert text_of(ask(obeying, messages, tools=[TOOL])) == "It is\n\nopen."
    given = [messages[0], messages[2], {"role": "system", "content": "There are two helpers."}]
    messages = MessagesBody(messages=given, max_tokens=1).as_chat_body().messages
    roles = [m.role for m in merge_into_turns(messages)]
    assert roles == ["user", "tool", "tool", "user"]  # many templates refuse a later system message


def test_a_schema_and_a_forced_call(obeying):
    for choice in ({"type": "any"}, {"type": "tool", "name": "open"}):
        message = ask(obeying, f"SAY: {CALL}", tools=[TOOL], tool_choice=choice)
        (call,) = message.content
        assert (call.type, call.input, message.stop_reason) == (
            "tool_use",
            {"door": "green"},
            "tool_use",
        )
    schema = {"type": "object", "properties": {"door": {"enum": ["red"]}}, "required": ["door"]}
    about = {"type": "json_schema", "schema": schema | {"additionalProperties": False}}
    for field in ({"output_format": about}, {"output_config": {"format": about}}):
        assert text_of(ask(obeying, 'SAY: {"door": "red"}', extra_body=field)) == '{"door": "red"}'


def test_tools_and_reasoning_reach_the_template(agent, obeying):
    encode = agent.engine.loaded.tokenizer.encode
    n_plain = n_prompt(obeying)
    search = {"type": "web_search_20250305", "name": "web_search"}  # ignored: it runs at Anthropic
    for text, body in {
        "[open] ": {"tools": [TOOL, search]},
        "": {"tools": [TOOL], "tool_choice": {"type": "none"}},
        "<think></think>": {"thinking": {"type": "disabled"}},
    }.items():
        assert n_prompt(obeying, **body) == n_plain + len(encode(text, add_special_tokens=False))


def test_refusals_are_the_clients_own_exceptions(client):
    with pytest.raises(anthropic.NotFoundError, match="GET /v1/messages/batches"):
        client.messages.batches.list()
    with serving(api_key="secret") as locked:
        client = connected(anthropic.Anthropic, locked)
        with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
            ask(client, HELLO)
        client.api_key = "secret"
        with pytest.raises(anthropic.BadRequestError, match="top_k must be less than"):
            ask(client, HELLO, extra_body={"top_k": 10**6})
        locked.engine.stop()
        with pytest.raises(anthropic.InternalServerError, match="overloaded_error"):
            n_prompt(client)
