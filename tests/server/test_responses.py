"""OpenAI's responses, asked by OpenAI's own client."""

import json
import random

import openai
import pytest

from mlx_snapkv.demo.questions import make_haystack

PARAMETERS = {"type": "object", "properties": {"door": {"type": "string"}}}
TOOL = {"type": "function", "name": "open", "parameters": PARAMETERS, "strict": False}
CALL = '<tool_call>{"name": "open", "arguments": {"door": "green"}}</tool_call>'
PROBE = {"type": "message", "role": "user"}


def connect(served):
    url = f"{served.url}/v1"
    return openai.OpenAI(base_url=url, api_key="any", timeout=60, max_retries=0)


@pytest.fixture(scope="module")
def client(served):
    return connect(served)


@pytest.fixture(scope="module")
def obeying(agent):
    return connect(agent)


@pytest.fixture(scope="module")
def document(demo_llama):
    return make_haystack(demo_llama[1], random.Random(21), 4, 1500)


def ask(client, given, **options):
    return client.responses.create(model="gpt-5-codex", input=given, **options)


def streamed(client, given, **options):
    """The events of a stream, and its final response."""
    with client.responses.stream(model="gpt-5-codex", input=given, **options) as stream:
        events = list(stream)
        return events, stream.get_final_response()


def said(role, text, kind="input_text"):
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def test_follow_ups_resend_what_was_answered(client, document):
    text, facts = document
    items = []
    for i, fact in enumerate(facts):
        items.append(said("user", fact.question if i else f"{text}\n\n{fact.question}"))
        response = ask(client, items, instructions="Be brief.", store=False, include=[])
        assert response.output_text == fact.value and response.status == "completed"
        assert response.model == "gpt-5-codex" and response.store is False
        used = response.usage
        assert used.total_tokens == used.input_tokens + used.output_tokens
        items += [item.model_dump(exclude_none=True) for item in response.output]
    assert used.input_tokens > used.input_tokens_details.cached_tokens > 1400


def test_a_stream_is_the_whole_response_in_events(client, document):
    text, facts = document
    question = f"{text}\n\n{facts[0].question}"
    whole = ask(client, question)
    events, final = streamed(client, question)
    kinds = [event.type for event in events]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[2:4] == ["response.output_item.added", "response.content_part.added"]
    assert kinds[4 : 4 + len(deltas)] == ["response.output_text.delta"] * len(deltas)
    assert kinds[4 + len(deltas) :] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in deltas) == whole.output_text == facts[0].value
    assert final.output_text == whole.output_text
    assert final.usage.output_tokens == whole.usage.output_tokens
    raw = ask(client, question, stream=True)
    assert [event.type for event in raw] == kinds


def test_a_response_that_is_cut_is_incomplete(client):
    response = ask(client, "The key of", max_output_tokens=3)
    assert response.status == "incomplete" and response.usage.output_tokens == 3
    assert response.incomplete_details.reason == "max_output_tokens"
    *_, last = ask(client, "The key of", max_output_tokens=3, stream=True)
    assert last.type == "response.incomplete"
    assert last.response.output[0].content[0].text == response.output_text


def test_thoughts_and_tools(obeying):
    order = f"SAY: <think>It is shut.</think>\n\nI open it.\n{CALL}"
    # what Codex sends along: tools that a service runs, and fields for it
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
        assert [tool.name for tool in response.tools] == ["open"]
        used = response.usage
        assert 0 < used.output_tokens_details.reasoning_tokens < used.output_tokens
    kinds = {event.type for event in events}
    assert {f"response.reasoning_text.{end}" for end in ("delta", "done")} <= kinds
    assert {f"response.function_call_arguments.{end}" for end in ("delta", "done")} <= kinds
    items = [said("user", order), *(item.model_dump(exclude_none=True) for item in final.output)]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "SAY: It is open."}
    assert ask(obeying, [*items, result], **given).output_text == "It is open."
    result["output"] = [{"type": "input_text", "text": "SAY: It is open."}]
    assert ask(obeying, [*items, result], **given).output_text == "It is open."


def test_what_codex_says_is_in_an_order_that_templates_take(obeying):
    given = [
        said("developer", "Never ask."),
        said("user", "Rules."),
        said("user", "SAY: yes"),
    ]
    response = ask(obeying, given, instructions="Be brief.")
    as_one = [said("user", "Rules.\n\nSAY: yes")]
    other = ask(obeying, as_one, instructions="Be brief.\n\nNever ask.")
    assert response.usage.input_tokens == other.usage.input_tokens
    assert response.output_text == other.output_text == "yes"
    later = [
        said("user", "hi"),
        said("assistant", "ho", "output_text"),
        said("developer", "SAY: ok"),
    ]
    assert ask(obeying, later).output_text == "ok"


BAD = {
    "a number": ({"input": 5}, "input must be text or a list"),
    "nothing": ({"input": []}, "input must not be empty"),
    "a role": ({"input": [said("wizard", "hi")]}, "input.0.role should be"),
    "an image": (
        {"input": [{**PROBE, "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input.0.content.0.type should be 'input_text'",
    ),
    "a reference": ({"input": [{"type": "item_reference", "id": "a"}]}, "input.0 can't be read"),
    "a call": ({"input": [{"type": "function_call", "name": "a"}]}, "input.0.call_id is missing"),
    "an earlier response": ({"previous_response_id": "resp_1"}, "send the whole conversation"),
    "the background": ({"background": True}, "send the whole conversation"),
    "a forced tool": ({"tool_choice": "required"}, "no tool can be forced"),
    "a tool without name": ({"tools": [{"type": "function"}]}, "tools.0.name is missing"),
    "a tool that is none": ({"tools": [5]}, "tools must have a type each"),
    "tools for this model": ({"tools": [TOOL]}, "takes no tools"),
    "infinite": (
        {"tools": [{**TOOL, "parameters": {"most": float("inf")}}]},
        "parameters must have finite numbers",
    ),
    "a form": ({"text": {"format": {"type": "json_object"}}}, "text.format must be text"),
    "max_output_tokens": ({"max_output_tokens": 0}, "max_output_tokens should be greater"),
    "temperature": ({"temperature": float("nan")}, "temperature should be"),
    "metadata": ({"metadata": {"a": 5}}, "metadata.a should be a valid string"),
}


@pytest.mark.parametrize("name", BAD)
def test_mistakes_are_the_clients_own_exceptions(client, name):
    body, told = BAD[name]
    content = json.dumps({"input": "The key of", "max_output_tokens": 4, "stream": True} | body)
    options = {"headers": {"content-type": "application/json"}}
    with pytest.raises(openai.BadRequestError, match=told) as caught:
        client.post("/responses", cast_to=object, content=content.encode(), options=options)
    assert caught.value.type == "invalid_request_error"
    assert ask(client, "The key of", max_output_tokens=2).output_text


def test_nested_tools_are_refused_or_told(served):
    for depth in (50, 600, 900, 940, 980, 1200):
        deep = '{"a":' * depth + "1" + "}" * depth
        tool = f'{{"type": "function", "name": "b", "parameters": {deep}}}'
        for stream in ("true", "false"):
            choice = f'"tools": [{tool}], "tool_choice": "none", "stream": {stream}'
            body = f'{{"input": "The key of", "max_output_tokens": 2, {choice}}}'
            response = served.client.post("/v1/responses", content=body.encode())
            assert response.status_code < 500, (depth, response.text[:300])
            assert response.status_code != 200 or '"incomplete"' in response.text, (depth, stream)
