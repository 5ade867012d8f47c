"""Requests as agents and apps really send them, one oddity at a time, under the templates of several families."""

import json
from pathlib import Path

import pytest
import yaml
from acting_server import CHAT, MESSAGES, RESPONSES, TEXT
from agent_messages import ASKED, OPEN, PATHS, calls, user

CASES = yaml.safe_load(
    (Path(__file__).parents[1] / "fixtures" / "agents_requests.yaml").read_text()
)
PIXELS = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
N_PIXELS = len(PIXELS) * 3 // 4 - 2  # bytes
BASE64 = {"type": "base64", "media_type": "image/png", "data": PIXELS}
IMAGES = [
    {"type": "image", "source": BASE64},
    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXELS}"}},
    {"type": "input_image", "image_url": f"data:image/png;base64,{PIXELS}"},
]
SHOWN = [f"[image, {N_PIXELS} bytes, not shown to this model]"]
IMAGE_NOTE = "is not shown to the model"
ID = "call_0123456789abcdef0123456789abcdef"  # 37 characters, too long for Mistral's template


def chat_call(arguments="{}", call_id="c1", **fields):
    function = {"name": "open", "arguments": arguments}
    calls = [{"id": call_id, "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls, **fields}


def in_chat(content, role="tool"):
    """Return a chat with a tool result of the given content."""
    result = {"role": role, "tool_call_id": "c1", "content": content}
    return CHAT, {"messages": [user(), chat_call(), result]}


def in_message(content):
    call = {"type": "tool_use", "id": "c1", "name": "open", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": content}
    said = [user(), {"role": "assistant", "content": [call]}, user([result])]
    return MESSAGES, {"messages": said}


def in_response(content):
    call = {"type": "function_call", "call_id": "c1", "name": "open", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c1", "output": content}
    return RESPONSES, {"input": [user(), call, output]}


PARTS = [
    (None, []),
    ([], []),
    ("", []),
    ([None], []),
    ("Open.", ["Open."]),
    (["It is", "open."], ["It is", "open."]),
    ({"type": "text", "text": "Open."}, ["Open."]),
    ([{"type": "text", "text": "Open."}, {"type": "input_text", "text": "Wide."}], ["Open.", "Wide."]),
    ([{"type": "output_text", "text": None}], []),
    ({"door": "green"}, ['{"door": "green"}']),
    ([{"a": 1}, 7, True], ['{"a": 1}', "7", "true"]),
    ([{"type": "tool_reference", "tool_name": "shut"}], ["[tool shut]"]),
    ([{"type": "resource", "resource": {"uri": "file:///a", "text": "Notes."}}], ["Notes."]),
    ([{"type": "document", "source": {"type": "text", "data": "Notes."}, "title": "T"}], ["T\nNotes."]),
    ([{"type": "search_result", "source": "http://a", "content": [{"type": "text", "text": "Found."}]}], ["Found."]),
    ([{"type": "audio", "data": "UklGRg=="}], ["[audio, 4 bytes, not shown"]),
    ([{"type": "resource_link", "uri": "https://a.example/b"}], ["https://a.example/b"]),
    ([{"type": "brand_new", "x": {"y": 1}}], ['"x": {"y": 1}']),
    ([{"type": "text", "text": "half \ud83d"}], ["half \ufffd"]),
    ([{"type": "resource", "resource": {"uri": "a", "blob": "iVBORw0KGgo="}}], ["[file, 8 bytes, not shown"]),
    ({"type": "computer_screenshot", "image_url": "data:image/png;base64,iVBORw0KGgo="}, ["8 bytes, not shown"]),
    *(([{"type": "text", "text": "See:"}, image], ["See:", *SHOWN]) for image in IMAGES),
    *(([image], SHOWN) for image in IMAGES),
]  # fmt: skip


@pytest.mark.parametrize("place", [in_chat, in_message, in_response])
def test_a_tool_result_of_any_form_is_read(scripted, place):
    for content, words in PARTS:
        path, body = place(content)
        prompt, found = scripted.ask(path, **body)
        _, result = prompt.split("<|tool|>")
        for word in words:
            assert word in result, (content, result)
        assert words or result.startswith("<|end|>"), (content, result)
        left_out = any("not shown" in word for word in words)
        assert left_out == any(IMAGE_NOTE in each for each in found.get("warnings", [])), content


@pytest.mark.parametrize("case", CASES["conversations"])
def test_a_conversation_of_any_form_is_read(scripted, case):
    prompt, _ = scripted.ask(PATHS[case["send"]], **case["body"])
    rest = prompt
    for word in case["read"]:
        if word[0] == "-":
            assert word[1:] not in prompt
        else:
            _, found, rest = rest.partition(word)
            assert found, (word, prompt)


TWO_CALLS = {"role": "assistant", "tool_calls": chat_call()["tool_calls"] * 2}
RESULT = {"role": "tool", "tool_call_id": ID, "content": "Done."}
SYSTEM = {"role": "system", "content": "Be brief."}
THOUGHT = chat_call("{}", ID) | {"content": "I open it.", "reasoning_content": "Hm."}
STRICT = [
    ("mistral", [user(), chat_call("{}", ID), RESULT], ["[TOOL_CALLS]open(", "[RESULT ", "Done."]),
    ("mistral", [user("a"), user("b")], ["<|user|>a\n\nb"]),
    ("mistral", [chat_call("{}", ID), RESULT, user("c")], ["[TOOL_CALLS]open(", "<|user|>c"]),
    ("mistral", [{"role": "assistant", "content": "b"}, user("c")], ["<|user|>", "b", "<|user|>c"]),
    ("mistral", [user("a"), {"role": "tool", "content": "Done."}], ["Done."]),
    ("mistral", [user(), chat_call("{}", ID), RESULT, user("c")], ["[TOOL_CALLS]open(", "[RESULT ", "<|user|>c"]),
    ("mistral", [user(), chat_call("{}", ID), user("c")], ["[TOOL_CALLS]open(", "<|user|>c"]),
    ("gemma", [SYSTEM, user("a")], ["<|user|>Be brief.\n\na"]),
    ("gemma", [SYSTEM, user("a"), chat_call('{"a": 1}'), RESULT], ["Be brief.", "open", '{"a": 1}', "Done."]),
    ("gemma", [SYSTEM], ["<|user|>Be brief."]),
    ("plain", [user(), chat_call('{"a": 1}'), RESULT], ['<|assistant|>[open {"a": 1}]', "Done."]),
    ("llama3", [user(), TWO_CALLS, RESULT, RESULT], ['"open"', "<|tool|>Done.", '"open"', "<|tool|>Done."]),
    ("llama3", [user(), chat_call(""), RESULT], ['"parameters": {}', "<|tool|>Done."]),
    ("harmony", [user(), THOUGHT, RESULT], ["I open it.<tool_call>", "<|tool|>Done."]),
]  # fmt: skip


@pytest.mark.parametrize(("family", "messages", "words"), STRICT)
def test_messages_that_a_strict_template_refuses_are_rewritten(scripted, family, messages, words):
    prompt, found = scripted.ask(CHAT, family, messages=messages)
    assert found["choices"][0]["message"]["content"] == "Fine."
    for word in words:
        _, is_there, prompt = prompt.partition(word)
        assert is_there, (word, prompt)


def several_calls(*ids):
    """Return a message with several calls, each with its id as its argument."""
    made = (chat_call(json.dumps({"at": name}), name)["tool_calls"][0] for name in ids)
    return {"role": "assistant", "tool_calls": list(made)}


@pytest.mark.parametrize("family", ["chatml", "mistral", "gemma", "thinking"])
def test_results_are_read_in_the_order_of_their_calls(scripted, family):
    results = [{"role": "tool", "tool_call_id": name, "content": f"of {name}"} for name in "cab"]
    messages = [user(), several_calls("a", "b", "c"), *results, user("Go on.")]
    prompt, _ = scripted.ask(CHAT, family, messages=messages, answer="</think>Fine.")
    assert prompt.index("of a") < prompt.index("of b") < prompt.index("of c")


def test_a_template_with_one_call_per_message_gets_each_call_before_its_result(scripted):
    results = [{"role": "tool", "tool_call_id": name, "content": f"of {name}"} for name in "ba"]
    messages = [user(), several_calls("a", "b"), *results, several_calls("a", "b"), *results]
    prompt, found = scripted.ask(CHAT, "llama3", messages=messages)
    each = "".join(
        f'<|assistant|>{{"name": "open", "parameters": {{"at": "{name}"}}}}<|end|><|tool|>of {name}<|end|>'
        for name in "abab"
    )
    assert each in prompt and "warnings" not in found


def test_a_call_and_its_result_have_one_id_in_every_request(scripted):
    messages = [user(), chat_call("{}", ID), RESULT]
    prompt, found = scripted.ask(CHAT, "mistral", messages=messages)
    name = prompt.split("[RESULT ")[1][:9]
    assert f"open({name})" in prompt and "warnings" not in found
    assert scripted.ask(CHAT, "mistral", messages=messages)[0] == prompt


@pytest.mark.parametrize("case", CASES["efforts"])
def test_efforts_reach_the_template_or_cause_a_warning(scripted, case):
    path, body, words = PATHS[case["send"]], case["body"], case["read"]
    prompt, found = scripted.ask(path, "thinking", answer="</think>Yes.", **body)
    assert words in prompt and "warnings" not in found
    _, found = scripted.ask(path, "chatml", **body)
    assert ("chat_template_kwargs" in body) != ("is left out" in str(found.get("warnings")))


def test_numbers_may_have_the_forms_that_other_servers_take(scripted, served):
    for fields in (
        {"top_k": -1},
        {"max_tokens": -1},
        {"max_tokens": 300.0, "top_k": 4.0, "n": 1.0, "seed": 5.0},
    ):
        scripted.ask(CHAT, messages=ASKED, temperature=0.5, **fields)
    scripted.ask(RESPONSES, input="Look.", max_output_tokens=-1)
    scripted.ask(MESSAGES, messages=ASKED, max_tokens=300.0, top_k=-1)
    body = {"prompt": "The key of", "max_tokens": 4.0}
    assert served.post(TEXT, body).json()["usage"]["completion_tokens"] == 4
    for value in (0, -2, 4.5, "4"):
        assert served.post(TEXT, body | {"max_tokens": value}).status_code == 400


def test_warnings_are_in_the_answer_and_once_in_the_log(scripted, caplog):
    odd = {"messages": ASKED, "brand_new": 1, "user": "me", "store": True, "tools": []}
    for path, body in ((CHAT, odd), (MESSAGES, odd), (RESPONSES, {"input": "a", "brand_new": 1})):
        _, found = scripted.ask(path, **body)
        assert found["warnings"] == ["brand_new is left out: it is not known here"]
    assert len([m for m in caplog.messages if "brand_new" in m]) == 1
    assert "warnings" not in scripted.ask(CHAT, messages=ASKED)[1]
    streams = {
        CHAT: odd | {"stream": True},
        MESSAGES: odd | {"stream": True, "max_tokens": 20},
        RESPONSES: {"input": "a", "brand_new": 1, "stream": True},
    }
    for path, body in streams.items():
        with scripted.served.client.stream("POST", path, json=body) as response:
            events = [json.loads(x[6:]) for x in response.iter_lines() if x.startswith("data: {")]
        assert "brand_new is left out" in json.dumps(events), path


def test_tool_choice_may_have_any_form(scripted):
    doors = {"type": "object", "properties": {"door": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "open", "parameters": doors}}
    asked = {"messages": ASKED, "tools": [tool], "answer": calls(OPEN)}
    named, anthropics = {"type": "function", "name": "open"}, {"type": "tool", "name": "open"}
    for choice in ("auto", {"type": "auto"}, "required", named, {"type": "any"}, anthropics):
        prompt, found = scripted.ask(CHAT, tool_choice=choice, parallel_tool_calls=False, **asked)
        (call,) = found["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == "open" and "open" in prompt
        several = ["parallel_tool_calls is left out: an answer may call several tools"]
        assert found.get("warnings", []) == (several if "auto" in str(choice) else [])
    for choice in ("none", {"type": "none"}):
        prompt, _ = scripted.ask(CHAT, tool_choice=choice, **asked | {"answer": "Fine."})
        assert "open" not in prompt
    for choice in ({"type": "auto"}, {"type": "any"}, anthropics):
        tools = [{"name": "open", "input_schema": doors}]
        _, found = scripted.ask(MESSAGES, tool_choice=choice, **asked | {"tools": tools})
        assert [block["type"] for block in found["content"]] == ["tool_use"]


SEARCH = {"type": "web_search_20250305", "name": "web_search"}
LEFT_OUT = "tool_choice is left out: only functions are known here"


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "web_search"}])
def test_a_tool_choice_that_names_a_service_is_ignored(scripted, choice):
    _, found = scripted.ask(MESSAGES, messages=ASKED, tools=[SEARCH], tool_choice=choice)
    assert found["content"] == [{"type": "text", "text": "Fine."}] and LEFT_OUT in found["warnings"]
    body = {"input": "Look.", "tools": [{"type": "web_search"}], "tool_choice": "required"}
    assert LEFT_OUT in scripted.ask(RESPONSES, **body)[1]["warnings"]


def test_a_request_for_one_call_at_a_time_causes_a_warning(scripted):
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    tools = [{"name": "open", "input_schema": {"type": "object"}}]
    _, found = scripted.ask(MESSAGES, messages=ASKED, tools=tools, tool_choice=choice)
    assert found["warnings"] == [
        "parallel_tool_calls is left out: an answer may call several tools"
    ]


def test_a_tool_in_another_apis_form_keeps_its_schema(scripted):
    schema = {"type": "object", "properties": {"door": {"type": "string"}}}
    tools = [{"name": "open", "description": "A door.", "input_schema": schema}]
    prompt, _ = scripted.ask(CHAT, messages=ASKED, tools=tools)
    assert (
        '"parameters": {"type": "object", "properties"' in prompt and "input_schema" not in prompt
    )


def test_a_tool_whose_parameters_are_no_object_survives_a_rewrite(scripted):
    tools = [{"type": "function", "function": {"name": "open", "parameters": []}}]
    messages = [user(), chat_call("{}", ID), RESULT]  # the template refuses the long id
    prompt, _ = scripted.ask(CHAT, "mistral", messages=messages, tools=tools)
    assert "Done." in prompt and '"parameters": []' in prompt
