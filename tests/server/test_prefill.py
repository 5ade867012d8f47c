"""A chat may end with the beginning of the assistant's answer, which the answer continues without repeating it."""

import json

import pytest
from acting_server import CHAT, MESSAGES, RESPONSES
from agent_messages import ASKED, OPEN, calls, user
from agent_templates import FAMILIES

BEGUN = "The answer is"
SCHEMA = {"type": "object", "properties": {"door": {"enum": ["green"]}}, "required": ["door"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


def assistant(content, **fields):
    return {"role": "assistant", "content": content, **fields}


def text_of(path, found):
    if path == MESSAGES:
        return "".join(block.get("text", "") for block in found["content"])
    return found["choices"][0]["message"]["content"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_an_answer_continues_the_assistants_last_words(scripted, path, family):
    for words in (BEGUN, f"{BEGUN}:\n\n", f" {BEGUN} "):
        prompt, found = scripted.ask(
            path, family, answer=" green.", messages=[*ASKED, assistant(words)]
        )
        assert prompt.endswith(words.lstrip()) and "Look." in prompt, prompt
        assert text_of(path, found) == " green." and "warnings" not in found


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_streams_and_stop_texts_of_a_continued_answer(scripted, path):
    for stream in (False, True):
        scripted.answers["next"] = " green. Stop."
        body = {"messages": [*ASKED, assistant(BEGUN)], "max_tokens": 300, "stream": stream}
        body |= {"stop": ["Stop"], "stop_sequences": ["Stop"]}
        lines = scripted.post(path, body).text.splitlines()
        found = [json.loads(x.removeprefix("data: ")) for x in lines if "{" in x]
        if not stream:
            text = text_of(path, found[0])
        elif path == MESSAGES:
            text = "".join(e["delta"].get("text", "") for e in found if "delta" in e)
        else:
            text = "".join(e["choices"][0]["delta"].get("content", "") for e in found)
        assert text == " green. "


@pytest.mark.parametrize("content", ["", " \n", [], [{"type": "thinking", "thinking": "Hm."}]])
def test_an_empty_assistant_message_begins_a_new_answer(scripted, content):
    messages = [*ASKED, assistant(content)]
    for path in (CHAT, MESSAGES):
        prompt, found = scripted.ask(path, messages=messages)
        assert prompt == scripted.ask(path, messages=ASKED)[0] and prompt.endswith("<|assistant|>")
        assert ("warnings" in found) == ("Hm." in str(messages)) and text_of(path, found) == "Fine."


@pytest.mark.parametrize("family", FAMILIES)
def test_an_assistant_message_with_a_call_is_not_continued(scripted, family):
    call = {"type": "tool_use", "id": "c1", "name": "open", "input": {"door": "green"}}
    messages = [*ASKED, assistant([{"type": "text", "text": "I open it."}, call])]
    answer = "</think>Done." if family == "thinking" else "Done."
    prompt, found = scripted.ask(MESSAGES, family, answer, messages=messages)
    assert "open" in prompt and not prompt.endswith("open it.")
    assert text_of(MESSAGES, found) == "Done."


def test_words_that_the_template_leaves_out_are_appended_to_its_text(scripted):
    hf = scripted.tokenizer._tokenizer
    opens = "{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
    for template in (
        "{% for m in messages if m.role == 'user' %}<|user|>{{ m.content }}{% endfor %}" + opens,
        "{% if messages[-1].role != 'user' %}{{ raise_exception('no') }}{% endif %}"
        "<|user|>{{ messages[-1].content }}" + opens,
    ):
        scripted.answers["next"], usual = " green.", hf.chat_template
        hf.chat_template = template
        try:
            found = scripted.post(CHAT, {"messages": [*ASKED, assistant(BEGUN)]})
        finally:
            hf.chat_template = usual
        assert text_of(CHAT, found.json()) == " green."
        assert scripted.answers["prompt"].endswith(
            f"<|user|>Look.<|assistant|><think></think>\n\n{BEGUN}"
        )


def test_unfinished_thoughts_are_continued(scripted):
    for family in ("chatml", "thinking"):
        messages = [*ASKED, assistant("<think>It may")]
        prompt, found = scripted.ask(CHAT, family, " be.</think>Green.", messages=messages)
        message = found["choices"][0]["message"]
        assert prompt.endswith("<think>It may")
        assert (message["reasoning"], message["content"]) == (" be.", "Green.")
    prompt, _ = scripted.ask(CHAT, "thinking", messages=[*ASKED, assistant(BEGUN)])
    assert prompt.endswith(f"<|assistant|>{BEGUN}")


def test_calls_and_thoughts_after_a_continued_text(scripted):
    written = f" here: <think>Hm.</think>{calls(OPEN)}"
    _, found = scripted.ask(MESSAGES, answer=written, messages=[*ASKED, assistant(BEGUN)])
    assert [block["type"] for block in found["content"]] == ["text", "thinking", "tool_use"]
    assert found["content"][0]["text"] == " here: "


BEGINNINGS = [
    "{",
    '```json\n{"door"',
    "Here it is:\n",
    '{"door": "gre',
    "{ ",
    '{\n  "door": ',
    "{\n\n",
    'See [1] and {x}:\n{"door": "',
]


@pytest.mark.parametrize("begun", BEGINNINGS)
def test_unfinished_json_is_completed(served, begun):
    body = {"messages": [*ASKED, assistant(begun)], "response_format": FORMAT, "temperature": 0}
    for path in (CHAT, MESSAGES):
        own = {"output_format": {"type": "json_schema", "schema": SCHEMA}, "max_tokens": 60}
        found = served.post(path, body | own).json()
        start = begun[begun.rindex("{") :] if "{" in begun else ""
        assert json.loads(start + text_of(path, found)) == {"door": "green"}, found


def test_half_a_character_in_unfinished_json_is_accepted(served):
    body = {"messages": [*ASKED, assistant('{"a": "\ud83d')], "response_format": FORMAT}
    assert served.post(CHAT, content=json.dumps(body)).status_code == 200


def test_vllms_fields_for_a_prefill_are_obeyed(scripted):
    messages = [*ASKED, assistant(BEGUN, prefix=True, partial=True)]
    both = {"continue_final_message": True, "add_generation_prompt": False}
    for fields in ({}, both, {"chat_template_kwargs": both}):
        prompt, found = scripted.ask(CHAT, messages=messages, **fields)
        assert prompt.endswith(BEGUN) and "warnings" not in found
    prompt, _ = scripted.ask(CHAT, messages=messages, continue_final_message=False)
    assert prompt.endswith(f"{BEGUN}<|end|><|assistant|>")
    prompt, _ = scripted.ask(RESPONSES, input=messages)
    assert prompt.endswith(f"{BEGUN}<|end|><|assistant|>")


def test_a_prefill_is_counted_and_found_in_the_prefix_cache(scripted):
    messages = [user("Look. " * 300), assistant(BEGUN)]
    for known in (False, True):
        _, found = scripted.ask(MESSAGES, answer=" green.", messages=messages)
        assert (found["usage"]["cache_read_input_tokens"] > 200) == known
    usage = found["usage"]
    n_read = usage["input_tokens"] + usage["cache_read_input_tokens"]
    with scripted.family("chatml"):
        counted = scripted.post(f"{MESSAGES}/count_tokens", {"messages": messages}).json()
    assert counted["input_tokens"] == n_read
