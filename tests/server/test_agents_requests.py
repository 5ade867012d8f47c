"""What agents and apps really send, in odd forms that stand for their kinds, against templates of several families."""

import gzip
import json
import zlib
from pathlib import Path

import pytest
import yaml
from acting_server import CHAT, MESSAGES, RESPONSES, TEXT, answering
from server_helpers import serving

PATHS = {"chat": CHAT, "messages": MESSAGES, "responses": RESPONSES}
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
ID = "call_0123456789abcdef0123456789abcdef"  # of 37 characters


@pytest.fixture(scope="module")
def agent():
    with answering() as found:
        yield found


def user(content="Look."):
    return {"role": "user", "content": content}


ASKED = [user()]


def chat_call(arguments="{}", call_id="c1", **fields):
    function = {"name": "open", "arguments": arguments}
    calls = [{"id": call_id, "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls, **fields}


def in_chat(content, role="tool"):
    """A chat with a tool's result of this content."""
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
    *(([{"type": "text", "text": "See:"}, image], ["See:", *SHOWN]) for image in IMAGES),
    *(([image], SHOWN) for image in IMAGES),
]  # fmt: skip


@pytest.mark.parametrize("place", [in_chat, in_message, in_response])
def test_a_result_of_any_form_is_read(agent, place):
    for content, words in PARTS:
        path, body = place(content)
        prompt, found = agent.ask(path, **body)
        _, result = prompt.split("<|tool|>")
        for word in words:
            assert word in result, (content, result)
        assert words or result.startswith("<|end|>"), (content, result)
        left_out = any("not shown" in word for word in words)
        assert left_out == any(IMAGE_NOTE in each for each in found.get("warnings", [])), content


@pytest.mark.parametrize("case", CASES["conversations"])
def test_a_conversation_of_any_form_is_read(agent, case):
    prompt, _ = agent.ask(PATHS[case["send"]], **case["body"])
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
STRICT = [
    ("mistral", [user(), chat_call("{}", ID), RESULT], ["[TOOL_CALLS]open(", "[RESULT ", "Done."]),
    ("mistral", [user("a"), user("b")], ["<|user|>a\n\nb"]),
    ("mistral", [chat_call("{}", ID), RESULT, user("c")], ["[TOOL_CALLS]open(", "<|user|>c"]),
    ("mistral", [{"role": "assistant", "content": "b"}, user("c")], ["<|user|>", "b", "<|user|>c"]),
    ("mistral", [user("a"), {"role": "tool", "content": "Done."}], ["Done."]),
    ("gemma", [SYSTEM, user("a")], ["<|user|>Be brief.\n\na"]),
    ("gemma", [SYSTEM, user("a"), chat_call('{"a": 1}'), RESULT], ["Be brief.", "open", '{"a": 1}', "Done."]),
    ("gemma", [SYSTEM], ["<|user|>Be brief."]),
    ("plain", [user(), chat_call('{"a": 1}'), RESULT], ['<|assistant|>[open {"a": 1}]', "Done."]),
    ("llama3", [user(), TWO_CALLS, RESULT, RESULT], ["[open {}]\n[open {}]", "Done.", "Done."]),
    ("llama3", [user(), chat_call(""), RESULT], ['"parameters": {}', "<|tool|>Done."]),
]  # fmt: skip


@pytest.mark.parametrize(("family", "messages", "words"), STRICT)
def test_what_a_strict_template_refuses_is_put_differently(agent, family, messages, words):
    prompt, found = agent.ask(CHAT, family, messages=messages)
    assert found["choices"][0]["message"]["content"] == "Fine."
    for word in words:
        _, is_there, prompt = prompt.partition(word)
        assert is_there, (word, prompt)


def test_ids_are_the_same_in_call_and_result_and_with_each_request(agent):
    messages = [user(), chat_call("{}", ID), RESULT]
    prompt, found = agent.ask(CHAT, "mistral", messages=messages)
    name = prompt.split("[RESULT ")[1][:9]
    assert f"open({name})" in prompt and "warnings" not in found
    assert agent.ask(CHAT, "mistral", messages=messages)[0] == prompt


THINKS = "<think>Hm.</think>Yes."


@pytest.mark.parametrize("case", CASES["efforts"])
def test_efforts_reach_the_template_or_a_warning_says_so(agent, case):
    path, body, words = PATHS[case["send"]], case["body"], case["read"]
    prompt, found = agent.ask(path, "thinking", answer="</think>Yes.", **body)
    assert words in prompt and "warnings" not in found
    _, found = agent.ask(path, "chatml", **body)
    assert ("chat_template_kwargs" in body) != ("is left out" in str(found.get("warnings")))


@pytest.mark.parametrize("family", ["thinking", "ending"])
@pytest.mark.parametrize("question", ["What does <think> mean?", "<think>", "Say <think>\u00a4"])
def test_thoughts_begin_where_the_template_has_them(agent, family, question):
    answer = "Hm.</think>Yes." if family == "thinking" else "Yes."
    _, found = agent.ask(CHAT, family, answer, messages=[user(question)])
    message = found["choices"][0]["message"]
    assert message["content"] == "Yes."
    thought = "Hm." if family == "thinking" else None
    assert message.get("reasoning") == message.get("reasoning_content") == thought


def calls(*written):
    return "".join(f"<tool_call>{text}</tool_call>" for text in written)


OPEN = '{"name": "open", "arguments": {"door": "green"}}'
ODD = '{"name": "write", "arguments": {"text": "ends with </tool_call> and <tool_call>"}}'
TORN = '{"name": "open", "arguments": {"a": "no quote}}'
ANSWERS = [
    # What the model writes, further fields, and the text, the calls and the reason that come of it.
    (f"A{calls(ODD)}B", {}, "AB", [{"text": "ends with </tool_call> and <tool_call>"}], "tool_calls"),
    (calls(ODD, OPEN), {}, "", [{"text": "ends with </tool_call> and <tool_call>"}, {"door": "green"}], "tool_calls"),
    (calls('{"arguments": {"a": 1}}'), {}, '{"arguments": {"a": 1}}', [], "stop"),
    (calls('{"name": "", "arguments": {}}'), {}, '{"name": "", "arguments": {}}', [], "stop"),
    (calls('{"name": "open", "arguments": "{\\"door\\": \\"green\\"}"}'), {}, "", [{"door": "green"}], "tool_calls"),
    (calls('{"name": "open", "arguments": null}'), {}, "", [{}], "tool_calls"),
    (calls('{"name": "open", "arguments": {"a": NaN}}'), {}, '{"name": "open", "arguments": {"a": NaN}}', [], "stop"),
    (calls('{"name": "open", "arguments": {"a": "half \\ud83d"}}'), {}, "", [{"a": "half \ufffd"}], "tool_calls"),
    (calls("[" * 3000), {"max_tokens": 4000}, "[" * 3000, [], "stop"),
    (calls('{"name": "open"}'), {}, "", [{}], "tool_calls"),
    (calls('{"name": "open", "parameters": {"a": 1}}'), {}, "", [{"a": 1}], "tool_calls"),
    (calls(OPEN + "}"), {}, "", [{"door": "green"}], "tool_calls"),
    (calls(f"\n{OPEN}\n{OPEN}\n"), {}, "", [{"door": "green"}] * 2, "tool_calls"),
    (calls(f"[{OPEN}]"), {}, "", [{"door": "green"}], "tool_calls"),
    (calls("open the door") + "B", {}, "open the doorB", [], "stop"),
    (calls(TORN, OPEN), {}, TORN, [{"door": "green"}], "tool_calls"),
    ("<think>Stop here.</think>Stop it.", {"stop": "here"}, "Stop it.", [], "stop"),
    ("<think>a\n\nb</think>\n\nYes.\n\nNo.", {"stop": ["\n\n"]}, "\n\nYes.", [], "stop"),
    ("Stop it here or there.", {"stop": ["here", None]}, "Stop it ", [], "stop"),
    (f"A{calls(OPEN)}", {"stop": ["green"]}, "A", [{"door": "green"}], "tool_calls"),
    ("<tool_call>" + OPEN[:-3], {}, OPEN[:-3], [], "stop"),
]  # fmt: skip


@pytest.mark.parametrize(("written", "fields", "text", "wanted", "reason"), ANSWERS)
def test_nothing_of_an_answer_is_lost(agent, written, fields, text, wanted, reason):
    _, found = agent.ask(CHAT, answer=written, messages=ASKED, **fields)
    (choice,) = found["choices"]
    message = choice["message"]
    found = [json.loads(call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    assert (message["content"] or "", found, choice["finish_reason"]) == (text, wanted, reason)


def test_a_call_that_max_tokens_cuts_is_text(agent):
    for n in range(3, 18):
        _, found = agent.ask(CHAT, answer=calls(OPEN), messages=ASKED, max_tokens=n)
        (choice,) = found["choices"]
        assert choice["finish_reason"] == "length" and "tool_calls" not in choice["message"]
    assert choice["message"]["content"].startswith('{"name"')


def test_a_call_without_a_name_is_no_error_of_anthropics(agent):
    _, found = agent.ask(MESSAGES, answer=calls('{"arguments": "{"}'), messages=ASKED)
    assert found["content"] == [{"type": "text", "text": '{"arguments": "{"}'}]


def test_numbers_as_other_servers_take_them(agent, served):
    for fields in (
        {"top_k": -1},
        {"max_tokens": -1},
        {"max_tokens": 300.0, "top_k": 4.0, "n": 1.0, "seed": 5.0},
    ):
        agent.ask(CHAT, messages=ASKED, temperature=0.5, **fields)
    agent.ask(RESPONSES, input="Look.", max_output_tokens=-1)
    agent.ask(MESSAGES, messages=ASKED, max_tokens=300.0, top_k=-1)
    body = {"prompt": "The key of", "max_tokens": 4.0}
    assert served.post(TEXT, body).json()["usage"]["completion_tokens"] == 4
    for value in (0, -2, 4.5, "4"):
        assert served.post(TEXT, body | {"max_tokens": value}).status_code == 400


def test_several_texts_get_a_choice_each(served):
    texts = ["The key of", "The door", "The key of"]
    body = {"max_tokens": 8, "temperature": 0}
    alone = [served.post(TEXT, body | {"prompt": t}).json() for t in texts]
    wanted = [found["choices"][0]["text"] for found in alone]
    tokens = [served.engine.loaded.tokenizer.encode(text) for text in texts]
    for prompt in (texts, tokens):
        found = served.post(TEXT, body | {"prompt": prompt}).json()
        assert [c["text"] for c in found["choices"]] == wanted
        assert [c["index"] for c in found["choices"]] == [0, 1, 2]
        assert found["usage"]["prompt_tokens"] == sum(f["usage"]["prompt_tokens"] for f in alone)
    twice = served.post(TEXT, body | {"prompt": texts[:2], "n": 2}).json()
    assert [c["text"] for c in twice["choices"]] == [wanted[0]] * 2 + [wanted[1]] * 2
    assert twice["usage"]["prompt_tokens"] == sum(f["usage"]["prompt_tokens"] for f in alone[:2])
    refused = served.post(TEXT, body | {"prompt": ["a"] * 1000})
    assert refused.status_code == 400 and "ask for fewer" in refused.text


def test_warnings_are_in_the_answer_and_once_in_the_log(agent, caplog):
    odd = {"messages": ASKED, "brand_new": 1, "user": "me", "store": True, "tools": []}
    for path, body in ((CHAT, odd), (MESSAGES, odd), (RESPONSES, {"input": "a", "brand_new": 1})):
        _, found = agent.ask(path, **body)
        assert found["warnings"] == ["brand_new is left out: it is not known here"]
    assert len([m for m in caplog.messages if "brand_new" in m]) == 1
    assert "warnings" not in agent.ask(CHAT, messages=ASKED)[1]
    streams = {
        CHAT: odd | {"stream": True},
        MESSAGES: odd | {"stream": True, "max_tokens": 20},
        RESPONSES: {"input": "a", "brand_new": 1, "stream": True},
    }
    for path, body in streams.items():
        with agent.served.client.stream("POST", path, json=body) as response:
            events = [json.loads(x[6:]) for x in response.iter_lines() if x.startswith("data: {")]
        assert "brand_new is left out" in json.dumps(events), path


def test_a_choice_of_tools_in_any_form(agent):
    tool = {"type": "function", "function": {"name": "open", "parameters": {"type": "object"}}}
    asked = {"messages": ASKED, "tools": [tool], "answer": calls(OPEN)}
    for choice in ("auto", {"type": "auto"}, "required", {"type": "function", "name": "open"}):
        prompt, found = agent.ask(CHAT, tool_choice=choice, parallel_tool_calls=False, **asked)
        (call,) = found["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == "open" and "open" in prompt
        several = ["parallel_tool_calls is left out: an answer may call several tools"]
        assert found.get("warnings", []) == (several if "auto" in str(choice) else [])
    for choice in ("none", {"type": "none"}):
        prompt, _ = agent.ask(CHAT, tool_choice=choice, **asked | {"answer": "Fine."})
        assert "open" not in prompt
    for choice in ({"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "open"}):
        tools = [{"name": "open", "input_schema": {"type": "object"}}]
        _, found = agent.ask(MESSAGES, tool_choice=choice, **asked | {"tools": tools})
        assert [block["type"] for block in found["content"]] == ["tool_use"]


def test_packed_bodies(served):
    body = json.dumps({"prompt": "The key of", "max_tokens": 2}).encode()
    for name, data in (("gzip", gzip.compress(body)), ("deflate", zlib.compress(body))):
        headers = {"Content-Encoding": name}
        assert served.post(TEXT, content=data, headers=headers).status_code == 200
    for name, data, status in (
        ("gzip", body, 400),
        ("gzip", gzip.compress(body)[:-9], 400),
        ("gzip", gzip.compress(b" " * (40 << 20)), 413),
        ("br", body, 415),
        ("gzip, gzip", body, 415),
    ):
        found = served.post(TEXT, content=data, headers={"Content-Encoding": name})
        assert found.status_code == status, (name, found.text)
        assert found.json()["error"]["message"]


def test_base_urls_without_v1_or_with_two(served):
    hello = {"messages": [user("Hello")], "max_tokens": 2}
    for path in ("/chat/completions", "/v1/v1/messages", "/messages", "/v1/chat/completions/"):
        assert served.post(path, hello).status_code == 200, path
    for path in ("/models", "/v1/v1/models", "/"):
        assert served.client.get(path).status_code == 200
        head = served.client.head(path)
        assert head.status_code == 200 and not head.content
    assert served.client.head(CHAT).status_code == 405


def test_a_host_that_is_not_allowed_names_the_flag_that_allows_it(served):
    hello, name = {"prompt": "The key of", "max_tokens": 2}, "host.docker.internal"
    headers = {"Host": f"{name}:8080"}
    refused = served.post(TEXT, hello, headers=headers)
    assert refused.status_code == 403 and f"--allow-host {name}" in refused.text
    with serving(hosts=(name,)) as allowing:
        for own in (headers, headers | {"Origin": f"http://{name}:8080"}, {"Host": name.upper()}):
            assert allowing.post(TEXT, hello, headers=own).status_code == 200
        assert allowing.post(TEXT, hello, headers={"Host": "evil.example"}).status_code == 403


def test_log_probabilities_have_the_tokens_own_bytes(agent):
    said = "Fly \U0001f468\u200d\U0001f680 \u00e9!"
    _, found = agent.ask(CHAT, answer=said, messages=ASKED, logprobs=True, top_logprobs=1)
    tokens = found["choices"][0]["logprobs"]["content"][:-1]  # the last one ends the answer
    assert bytes(b for token in tokens for b in token["bytes"]).decode() == said
    assert any(token["token"] == "\ufffd" for token in tokens)
    assert all(token["top_logprobs"][0]["bytes"] == token["bytes"] for token in tokens)
