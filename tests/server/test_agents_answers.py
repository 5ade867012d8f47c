"""Model answers as agents and apps receive them: reasoning, odd or incomplete calls, stop strings, choices, bytes."""

import json

import pytest
from acting_server import CHAT, MESSAGES, RESPONSES, TEXT
from agent_messages import ASKED, OPEN, calls, user


@pytest.mark.parametrize("family", ["thinking", "ending"])
@pytest.mark.parametrize("question", ["What does <think> mean?", "<think>", "Say <think>\u00a4"])
def test_thoughts_begin_where_the_template_opens_them(scripted, family, question):
    answer = "Hm.</think>Yes." if family == "thinking" else "Yes."
    _, found = scripted.ask(CHAT, family, answer, messages=[user(question)])
    message = found["choices"][0]["message"]
    assert message["content"] == "Yes."
    thought = "Hm." if family == "thinking" else None
    assert message.get("reasoning") == message.get("reasoning_content") == thought


ODD = '{"name": "write", "arguments": {"text": "ends with </tool_call> and <tool_call>"}}'
TORN = '{"name": "open", "arguments": {"a": "no quote}}'
ANSWERS = [
    # The model's output, more fields, and the expected text, arguments of calls and finish reason.
    (f"A{calls(ODD)}B", {}, "AB", [{"text": "ends with </tool_call> and <tool_call>"}], "tool_calls"),
    (calls(ODD, OPEN), {}, "", [{"text": "ends with </tool_call> and <tool_call>"}, {"door": "green"}], "tool_calls"),
    (calls('{"arguments": {"a": 1}}'), {}, '{"arguments": {"a": 1}}', [], "stop"),
    (calls('{"name": "", "arguments": {}}'), {}, '{"name": "", "arguments": {}}', [], "stop"),
    (calls('{"name": "open", "arguments": "{\\"door\\": \\"green\\"}"}'), {}, "", [{"door": "green"}], "tool_calls"),
    (calls('{"name": "open", "arguments": null}'), {}, "", [{}], "tool_calls"),
    (calls('{"name": "open", "arguments": {"a": NaN}}'), {}, '{"name": "open", "arguments": {"a": NaN}}', [], "stop"),
    (calls('{"name": "open", "arguments": {"a": "half \\ud83d"}}'), {}, "", [{"a": "half \ufffd"}], "tool_calls"),
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
    ("<tool_call>" + OPEN[:-1], {}, OPEN[:-1], [], "stop"),
    (calls(OPEN[:-1]), {}, "", [{"door": "green"}], "tool_calls"),
    (calls(OPEN[:-2]), {}, OPEN[:-2], [], "stop"),
    (calls("{'name': 'open', 'arguments': {'door': None}}"), {}, "", [{"door": None}], "tool_calls"),
    (calls('{"name": "open", "arguments": {"door": "green",}}'), {}, "", [{"door": "green"}], "tool_calls"),
    (calls(f"```json\n{OPEN}\n```"), {}, "", [{"door": "green"}], "tool_calls"),
    (calls("<tool_call>" + OPEN), {}, "", [{"door": "green"}], "tool_calls"),
    (calls('{"name": "open", "input": {"a": 1}}'), {}, "", [{"a": 1}], "tool_calls"),
    (calls('{"name": "open", "a": 1}'), {}, "", [{"a": 1}], "tool_calls"),
    (calls('{"function": "open", "arguments": {"a": 1}}'), {}, "", [{"a": 1}], "tool_calls"),
    (calls('{"name": "open", "arguments": {"path": "a\\/b"}'), {}, "", [{"path": "a/b"}], "tool_calls"),
    (calls('{"name": "open", "id": 5}'), {}, '{"name": "open", "id": 5}', [], "stop"),
]  # fmt: skip


@pytest.mark.parametrize(("written", "fields", "text", "wanted", "reason"), ANSWERS)
def test_nothing_of_an_answer_is_lost(scripted, written, fields, text, wanted, reason):
    _, found = scripted.ask(CHAT, answer=written, messages=ASKED, **fields)
    (choice,) = found["choices"]
    message = choice["message"]
    found = [json.loads(call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    assert (message["content"] or "", found, choice["finish_reason"]) == (text, wanted, reason)


def test_a_call_within_thoughts_does_not_end_them(scripted):
    for call, made in ((OPEN, 1), ("open it", 0)):
        written = f"<think>I {calls(call)} it.</think>Done."
        _, found = scripted.ask(CHAT, answer=written, messages=ASKED)
        message = found["choices"][0]["message"]
        assert message["content"] == "Done." and len(message.get("tool_calls", [])) == made
        assert message["reasoning"] == ("I  it." if made else "I open it it.")


def test_an_answer_after_thoughts_about_a_call_is_not_a_thought(scripted):
    written = "<think>I should use the <tool_call> tag.</think>The answer is 42."
    _, found = scripted.ask(CHAT, answer=written, messages=ASKED)
    assert found["choices"][0]["message"]["content"].endswith("The answer is 42.")


def test_a_call_that_max_tokens_cuts_is_text(scripted):
    for n in range(3, 18):
        _, found = scripted.ask(CHAT, answer=calls(OPEN), messages=ASKED, max_tokens=n)
        (choice,) = found["choices"]
        assert choice["finish_reason"] == "length" and "tool_calls" not in choice["message"]
    assert choice["message"]["content"].startswith('{"name"')


def test_a_call_without_a_name_is_text_in_anthropics_api(scripted):
    _, found = scripted.ask(MESSAGES, answer=calls('{"arguments": "{"}'), messages=ASKED)
    assert found["content"] == [{"type": "text", "text": '{"arguments": "{"}'}]


def test_an_answer_of_only_whitespace_is_sent_by_every_api(scripted):
    _, chat = scripted.ask(CHAT, answer="\n\n", messages=ASKED)
    _, message = scripted.ask(MESSAGES, answer="\n\n", messages=ASKED)
    _, response = scripted.ask(RESPONSES, answer="\n\n", input=ASKED)
    parts = chat["choices"][0]["message"], *message["content"], *response["output"][0]["content"]
    assert [part.get("text", part.get("content")) for part in parts] == ["\n\n"] * 3
    streamed = scripted.post(RESPONSES, {"input": ASKED, "stream": True}).text
    assert streamed.count("event: response.output_text.delta") == 1
    _, message = scripted.ask(MESSAGES, answer="<think>\n\n</think>", messages=ASKED)
    assert message["content"] == []


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


def test_log_probabilities_have_the_tokens_own_bytes(scripted):
    said = "Fly \U0001f468\u200d\U0001f680 \u00e9!"
    _, found = scripted.ask(CHAT, answer=said, messages=ASKED, logprobs=True, top_logprobs=1)
    tokens = found["choices"][0]["logprobs"]["content"][:-1]  # the last one ends the answer
    assert bytes(b for token in tokens for b in token["bytes"]).decode() == said
    assert any(token["token"] == "\ufffd" for token in tokens)
    assert all(token["top_logprobs"][0]["bytes"] == token["bytes"] for token in tokens)
