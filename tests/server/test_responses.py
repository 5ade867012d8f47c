"""OpenAI's Responses API, called by OpenAI's own client."""

import json

import openai
import pytest
from server_helpers import connected

DOOR = {"type": "object", "properties": {"door": {"type": "string"}}}
TOOL = {"type": "function", "name": "open", "parameters": DOOR, "strict": False}
CALL = '<tool_call>{"name": "open", "arguments": {"door": "green"}}</tool_call>'


@pytest.fixture(scope="module")
def client(served):
    return connected(openai.OpenAI, served, "/v1")


@pytest.fixture(scope="module")
def obeying(agent):
    return connected(openai.OpenAI, agent, "/v1")


def ask(client, given, **options):
    return client.responses.create(model="gpt-5-codex", input=given, **options)


def streamed(client, given, **options):
    """Return a stream's events and its final response."""
    with client.responses.stream(model="gpt-5-codex", input=given, **options) as stream:
        return list(stream), stream.get_final_response()


def test_a_schema_and_a_forced_call(obeying):
    schema = {"type": "object", "properties": {"door": {"enum": ["red"]}}, "required": ["door"]}
    about = {"type": "json_schema", "name": "x", "schema": schema | {"additionalProperties": False}}
    said = 'SAY: {"door": "red"}'
    assert json.loads(ask(obeying, said, text={"format": about}).output_text) == {"door": "red"}
    assert json.loads(ask(obeying, said, text={"format": {"type": "json_object"}}).output_text)
    for choice in ("required", {"type": "function", "name": "open"}):
        (call,) = ask(obeying, f"SAY: {CALL}", tools=[TOOL], tool_choice=choice).output
        assert (call.type, json.loads(call.arguments)) == ("function_call", {"door": "green"})
    custom = [{"type": "custom", "name": "patch"}, TOOL]
    said = 'SAY: <tool_call>{"name": "patch", "arguments": {"input": "*** Begin"}}</tool_call>'
    chosen = {"type": "custom", "name": "patch"}
    (call,) = ask(obeying, said, tools=custom, tool_choice=chosen).output
    assert (call.type, call.name, call.input) == ("custom_tool_call", "patch", "*** Begin")


def said(role, text, kind="input_text"):
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def test_a_stream_is_the_whole_response_in_events(client, document):
    text, facts = document
    question = f"{text}\n\n{facts[0].question}"
    whole = ask(client, question, instructions="Be brief.", store=False, include=[])
    assert (whole.status, whole.model, whole.store) == ("completed", "gpt-5-codex", False)
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    events, final = streamed(client, question, instructions="Be brief.")
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    kinds = [event.type.removeprefix("response.") for event in events]
    # Only events restart Codex's timeout, so events are sent while the prompt is read.
    assert (n_alive := kinds.count("in_progress")) > 2
    assert kinds == [
        *("created", *["in_progress"] * n_alive, "output_item.added", "content_part.added"),
        *["output_text.delta"] * len(deltas),
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(deltas) == final.output_text == whole.output_text == facts[0].value
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert final.usage.input_tokens > final.usage.input_tokens_details.cached_tokens > 1200
    *_, done, last = ask(client, "The key of", max_output_tokens=3, stream=True)
    assert (done.type, done.item.status) == ("response.output_item.done", "incomplete")
    assert last.type == "response.incomplete" and last.response.usage.output_tokens == 3
    assert last.response.incomplete_details.reason == "max_output_tokens"
    with pytest.raises(openai.BadRequestError, match="input must not be empty"):
        ask(client, [], stream=True)


def test_reasoning_and_tools(obeying):
    order = f"SAY: <think>It is shut.</think>\n\nI open it.\n{CALL}"
    # Codex also sends tools that run as a service, and fields for the service.
    given = {"tools": [TOOL, {"type": "web_search"}, {"type": "custom", "name": "apply_patch"}]}
    given |= {"parallel_tool_calls": False, "prompt_cache_key": "a", "include": []}
    given |= {"reasoning": {"summary": "auto"}, "text": {"verbosity": "low"}}
    events, final = streamed(obeying, order, **given)
    for response in (ask(obeying, order, tool_choice="auto", **given), final):
        thought, message, call = response.output
        assert (thought.type, thought.content[0].text) == ("reasoning", "It is shut.")
        assert message.content[0].text == response.output_text == "\n\nI open it.\n"
        assert (call.type, call.name) == ("function_call", "open")
        assert json.loads(call.arguments) == {"door": "green"}
        assert [tool.name for tool in response.tools] == ["open", "apply_patch"]
        used = response.usage
        assert 0 < used.output_tokens_details.reasoning_tokens < used.output_tokens
    kinds = {event.type for event in events}
    for kind in ("reasoning_text", "function_call_arguments"):
        assert {f"response.{kind}.delta", f"response.{kind}.done"} <= kinds
    items = [said("user", order), *response.output]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "SAY: Open."}
    assert ask(obeying, [*items, result], **given).output_text == "Open."


def test_messages_of_codex_are_put_into_an_order_that_templates_take(obeying):
    given = [said("developer", "Never ask."), said("user", "Rules."), said("user", "SAY: yes")]
    response = ask(obeying, given, instructions="Be brief.")
    as_one = [said("user", "Rules.\n\nSAY: yes")]
    other = ask(obeying, as_one, instructions="Be brief.\n\nNever ask.")
    assert response.usage.input_tokens == other.usage.input_tokens
    assert response.output_text == other.output_text == "yes"
    later = [said("user", "hi"), said("assistant", "ho", "output_text")]
    assert ask(obeying, [*later, said("developer", "SAY: ok")]).output_text == "ok"


def test_a_custom_tool_gets_a_text_as_its_input(obeying):
    patch = {"name": "apply_patch", "arguments": {"input": "*** Begin\n+a"}}
    order = f"SAY: <tool_call>{json.dumps(patch)}</tool_call>"
    given = {"tools": [TOOL, {"type": "custom", "name": "apply_patch", "description": "Patches."}]}
    events, final = streamed(obeying, order, **given)
    for response in (ask(obeying, order, **given), final):
        (call,) = response.output
        assert (call.type, call.name) == ("custom_tool_call", "apply_patch")
        assert call.input == "*** Begin\n+a"
    kinds = [event.type for event in events if "custom" in event.type]
    assert kinds == [f"response.custom_tool_call_input.{end}" for end in ("delta", "done")]
    result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "SAY: Done."}
    assert (
        ask(obeying, [said("user", order), *final.output, result], **given).output_text == "Done."
    )
