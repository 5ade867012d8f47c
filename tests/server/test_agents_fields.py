"""Agents and apps send fields in the format of another API, another server or an older version."""

import json
import socket

import pytest
from acting_server import CHAT, MESSAGES, RESPONSES, TEXT

CALL = '<tool_call>{{"name": "{}", "arguments": {{"door": "green"}}}}</tool_call>'
HALF = "half \ud83d"
OBJECT = {"type": "object", "properties": {"door": {"type": "string"}}}
FUNCTION = {"name": "open", "description": "Opens.", "parameters": OBJECT}
NESTED = {"type": "function", "function": FUNCTION}
FLAT = {"type": "function", **FUNCTION}
SHUT = {"type": "function", "function": {"name": "shut", "parameters": OBJECT}}
LOOK = {"role": "user", "content": "Look."}
CHAT_ASKED, RESPONSE_ASKED = {"messages": [LOOK]}, {"input": [LOOK]}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}


@pytest.fixture
def agent(scripted):
    return scripted


def events(agent, path, answer, **body):
    agent.answers["next"] = answer
    with agent.served.client.stream("POST", path, json=body | {"stream": True}) as response:
        return [json.loads(x[6:]) for x in response.iter_lines() if x.startswith("data: {")]


def test_codex_calls_an_mcp_servers_tools(agent):
    """Codex 0.171 sends MCP servers and its own agents as tool namespaces."""
    tools = [{**FLAT, "name": "read", "strict": False}, {"type": "web_search"}]
    fs, db = (
        {"type": "namespace", "name": n, "description": n, "tools": tools}
        for n in ("mcp__fs__", "db")
    )
    given = {**RESPONSE_ASKED, "tools": [FLAT, fs, db]}
    prompt, found = agent.ask(RESPONSES, answer=CALL.format("mcp__fs__read"), **given)
    assert all(f'"name": "{n}"' in prompt for n in ("open", "mcp__fs__read", "db__read"))
    assert [tool["type"] for tool in found["tools"]] == ["function", "namespace", "namespace"]
    (call,) = found["output"]
    assert (call["name"], call["namespace"]) == ("read", "mcp__fs__")
    sent = events(agent, RESPONSES, CALL.format("db__read"), **given)
    items = [event["item"] for event in sent if "item" in event]
    assert [(i["name"], i["namespace"]) for i in items] == [("read", "db")] * 2
    (done,) = [e for e in sent if e["type"] == "response.function_call_arguments.done"]
    assert done["name"] == "read"
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "Read."}
    given["input"] = [LOOK, call, result]
    prompt, found = agent.ask(RESPONSES, answer=CALL.format("open"), **given)
    assert '<tool_call>{"name": "mcp__fs__read"' in prompt and "<|tool|>Read." in prompt
    assert "namespace" not in found["output"][0]


def test_every_api_takes_tools_in_another_apis_form(agent):
    for path, body in ((CHAT, CHAT_ASKED), (MESSAGES, CHAT_ASKED), (RESPONSES, RESPONSE_ASKED)):
        for tool in (NESTED, FLAT):
            prompt, found = agent.ask(path, answer=CALL.format("open"), tools=[tool], **body)
            assert '"name": "open"' in prompt and "Opens." in prompt, (path, prompt)
            assert "green" in json.dumps(found) and "warnings" not in found


def test_half_a_character_in_tools_and_instructions_is_replaced(agent):
    """Apps truncate descriptions of MCP tools at a UTF-16 unit, which may split a character."""
    tool = {**FUNCTION, "description": HALF, "input_schema": {"description": HALF}}
    for path, body in (
        (CHAT, CHAT_ASKED),
        (MESSAGES, CHAT_ASKED | {"system": HALF}),
        (RESPONSES, RESPONSE_ASKED | {"instructions": HALF, "metadata": {"a": HALF}}),
    ):
        prompt, _ = agent.ask(path, tools=[{"type": "function", **tool}], **body)
        assert "half \ufffd" in prompt, path


def test_functions_the_predecessor_of_tools_are_called(agent):
    asked = {**CHAT_ASKED, "functions": [FUNCTION], "answer": CALL.format("open")}
    for choice in ("auto", None, {"name": "open"}):
        prompt, found = agent.ask(CHAT, function_call=choice, **asked)
        (choice,) = found["choices"]
        assert '"name": "open"' in prompt and "warnings" not in found
        assert choice["finish_reason"] == "function_call"
        call = choice["message"]["function_call"]
        assert (call["name"], json.loads(call["arguments"])) == ("open", {"door": "green"})
    prompt, found = agent.ask(CHAT, function_call="none", **asked | {"answer": "Fine."})
    assert "open" not in prompt and "warnings" not in found
    tools = [{"type": "function", "function": FUNCTION}]
    _, found = agent.ask(CHAT, tools=tools, **asked)
    assert found["choices"][0]["finish_reason"] == "tool_calls"  # tools replace functions
    fields = {"tools": tools, "answer": "Fine.", "function_call": "none"}
    assert '"open"' not in agent.ask(CHAT, **CHAT_ASKED, **fields)[0]
    unknown = agent.post(CHAT, CHAT_ASKED | {"function_call": {"name": "shut"}})
    assert unknown.status_code == 400 and "shut" in unknown.text
    twice = CALL.format("open") + CALL.format("shut")
    sent = events(agent, CHAT, twice, **CHAT_ASKED, functions=[FUNCTION])
    (call,) = [
        c["choices"][0]["delta"]["function_call"]
        for c in sent
        if "function_call" in str(c["choices"][0]["delta"])
    ]
    assert call["name"] == "open" and sent[-1]["choices"][0]["finish_reason"] == "function_call"


@pytest.mark.parametrize("path, asked", [(MESSAGES, CHAT_ASKED), (RESPONSES, RESPONSE_ASKED)])
def test_functions_are_called_in_every_api(agent, path, asked):
    fields = {"functions": [FUNCTION], "answer": CALL.format("open")}
    prompt, found = agent.ask(path, **asked, **fields)
    assert '"name": "open"' in prompt and "warnings" not in found
    (call,) = found.get("content") or found["output"]
    assert call["type"] in ("tool_use", "function_call") and call["name"] == "open"
    assert found.get("stop_reason", "tool_use") == "tool_use"
    no_call = "none" if path == RESPONSES else {"type": "none"}
    prompt, _ = agent.ask(path, tool_choice=no_call, **asked, **fields | {"answer": "Fine."})
    assert '"name": "open"' not in prompt


def test_a_choice_may_name_allowed_tools_or_services(agent):
    names = [{"type": "function", "function": {"name": "open"}}]
    tools = [NESTED, SHUT]
    for mode in ("auto", "required"):
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": names}}
        prompt, _ = agent.ask(
            CHAT, answer=CALL.format("open"), tool_choice=choice, tools=tools, **CHAT_ASKED
        )
        assert '"open"' in prompt and '"shut"' not in prompt
    choice = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "mcp", "server_label": "s"}, {"type": "function", "name": "shut"}],
    }
    prompt, _ = agent.ask(RESPONSES, tool_choice=choice, tools=tools, **RESPONSE_ASKED)
    assert '"open"' not in prompt and '"shut"' in prompt
    asked = {"tools": tools, "answer": CALL.format("open")}
    custom = {"type": "custom", "custom": {"name": "open"}}
    _, found = agent.ask(CHAT, tool_choice=custom, **asked, **CHAT_ASKED)
    assert found["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "open"
    for choice in ("required", {"type": "function", "function": {"name": "open"}}):
        _, found = agent.ask(MESSAGES, tool_choice=choice, **asked, **CHAT_ASKED)
        assert found["content"][0]["name"] == "open"
    _, found = agent.ask(
        RESPONSES, tool_choice={"type": "web_search_preview"}, tools=tools, **RESPONSE_ASKED
    )
    (note,) = found["warnings"]
    assert note == "tool_choice is left out: only functions are known here, no web_search_preview"
    bad = {"type": "allowed_tools", "allowed_tools": 5}
    assert agent.post(CHAT, CHAT_ASKED | {"tools": tools, "tool_choice": bad}).status_code == 400


def test_extreme_sampling_numbers_are_obeyed(served):
    def said(**fields):
        found = served.post(CHAT, CHAT_ASKED | {"max_tokens": 8} | fields)
        assert found.status_code == 200, found.text
        return found.json()["choices"][0]["message"]["content"]

    likeliest = said(temperature=0)
    assert said(temperature=1e-300) == likeliest
    assert said(temperature=1, top_p=0) == said(temperature=1, top_p=1e-300) == likeliest
    assert said(repetition_penalty=1, repetition_context_size=10**12) == likeliest
    assert said(temperature="0", xtc_threshold="0.1") == likeliest
    size = len(served.engine.loaded.tokenizer)
    bias = {str(token): -1e300 for token in range(size)} | {"5": 1e300}
    assert said(logit_bias=bias) == served.engine.loaded.tokenizer.decode([5] * 8).strip()
    assert said(logit_bias=bias, response_format={"type": "json_object"}).startswith("{")


def test_half_a_character_in_a_prompt_is_accepted(served):
    found = served.post(TEXT, content=json.dumps({"prompt": f"{HALF} ", "max_tokens": 2}))
    assert found.status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_half_a_character_in_a_name_is_replaced(served, stream):
    odd_part = {"role": "user", "content": ["Look.", {"type": HALF}]}
    for path, body in ((CHAT, {"messages": [odd_part]}), (TEXT, {"prompt": "The key of"})):
        named = {**body, "model": HALF, "max_tokens": 2, "stream": stream}
        found = served.post(path, content=json.dumps(named))
        assert found.status_code == 200 and '"half \ufffd"' in found.text
        assert ("of the type half \ufffd is not shown" in found.text) == (path == CHAT)


GREEN = {"type": "object", "properties": {"door": {"enum": ["green"]}}, "required": ["door"]}


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_object", "schema": GREEN},
        {"type": "json_schema", "schema": GREEN, "name": "x", "strict": True},
        {"type": "json_schema", "json_schema": {"schema": GREEN}, "schema": {"const": 5}},
    ],
)
def test_a_schema_may_be_where_other_servers_expect_it(served, form):
    body = CHAT_ASKED | {"response_format": form, "max_tokens": 50}
    found = served.post(CHAT, body).json()["choices"][0]["message"]["content"]
    assert json.loads(found) == {"door": "green"}


def test_a_json_format_without_a_schema_asks_for_an_object(served):
    form = {"type": "json_schema", "json_schema": {"name": "x"}}
    body = CHAT_ASKED | {"response_format": form, "max_tokens": 50}
    found = served.post(CHAT, body).json()["choices"][0]["message"]["content"]
    assert isinstance(json.loads(found), dict)


def test_fields_of_chat_completions_work_in_the_other_apis(agent, served):
    form = {"type": "json_schema", "json_schema": {"schema": GREEN}}
    found = served.post(RESPONSES, RESPONSE_ASKED | {"response_format": form, "max_tokens": 50})
    assert json.loads(found.json()["output"][0]["content"][0]["text"]) == {"door": "green"}
    _, found = agent.ask(MESSAGES, answer="Fine. Stop.", stop=["Stop"], **CHAT_ASKED)
    assert found["content"][0]["text"] == "Fine. " and found["stop_reason"] == "stop_sequence"


QUIET = [
    (CHAT, {"temperature": "0.7", "top_p": "1", "presence_penalty": "0", "stream_options": []}),
    (MESSAGES, {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}),
    (MESSAGES, {"temperature": 1.5, "tools": [{"name": "n" * 140, "input_schema": OBJECT}], "speed": "fast"}),
    (RESPONSES, {"metadata": {"n": 1}, "max_tool_calls": 3}),
    (RESPONSES, {"metadata": [], "temperature": 2.5}),
    (CHAT, {"logit_bias": [], "chat_template_kwargs": [], "metadata": [], "usage": {"include": True}}),
    (CHAT, {"prediction": {"type": "content", "content": "x"}, "function_call": "none"}),
    (CHAT, {"logprobs": False, "top_logprobs": 0}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields"), QUIET)
def test_fields_that_change_nothing_cause_no_warning(agent, path, fields):
    asked = RESPONSE_ASKED if path == RESPONSES else CHAT_ASKED
    assert "warnings" not in agent.ask(path, **asked, **fields)[1]


def test_a_request_to_clear_context_causes_a_warning(agent):
    edits = [{"type": "clear_tool_uses_20250919"}]
    _, found = agent.ask(MESSAGES, **CHAT_ASKED, context_management={"edits": edits})
    assert found["warnings"] == ["context_management is left out: it is not known here"]


def test_top_logprobs_without_logprobs_cause_a_warning(agent):
    for fields in ({}, {"logprobs": False}):
        _, found = agent.ask(CHAT, **CHAT_ASKED, top_logprobs=2, **fields)
        assert found["warnings"] == ["top_logprobs is left out: logprobs is not true"]
    _, found = agent.ask(MESSAGES, **CHAT_ASKED, top_logprobs=2)
    assert "warnings" not in found


def test_an_image_in_an_earlier_answered_turn_becomes_a_note(agent):
    seen = [{"role": "user", "content": [IMAGE]}, {"role": "assistant", "content": "A door."}]
    prompt, found = agent.ask(CHAT, messages=[*seen, LOOK])
    assert "[image, 2 bytes, not shown to this model]" in prompt and len(found["warnings"]) == 1
    assert agent.post(CHAT, {"messages": [*seen, *seen[:1]]}).status_code == 400


def test_double_slashes_and_options_star_are_answered(agent):
    agent.answers["next"] = "Fine."
    assert agent.post(f"/{CHAT}", CHAT_ASKED).status_code == 200
    port = int(agent.served.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.sendall(b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 404 ")
