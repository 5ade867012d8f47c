"""Whatever a client sends in place of a value, it is read, or refused with a 4xx."""

import pytest

from mlx_snapkv.completions.body import ChatBody, CompletionBody, Defaults
from mlx_snapkv.completions.request import completion_request
from mlx_snapkv.completions.validation import validate_body
from mlx_snapkv.server.anthropic.messages import CountedMessages, MessagesBody
from mlx_snapkv.server.api_error import as_api_error
from mlx_snapkv.server.openai.responses import ResponsesBody, ResponsesFormatter

ODD_VALUES = [None, True, 5, "x", "\ud800", float("nan"), [], {}, [None], {"type": []}]
DOOR = {"type": "object", "properties": {"door": {"type": "string"}}, "required": ["door"]}
OPEN = {"name": "open", "description": "Opens.", "parameters": DOOR}
TOOL = {"type": "function", "function": OPEN}
SEARCH = {"type": "web_search", "name": "web_search"}
CALL = {"id": "c", "type": "function", "function": {"name": "open", "arguments": "{}"}}
CHOICE = {"type": "function", "function": {"name": "open"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [CHOICE]}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": DOOR}}
TEXT = {"type": "text", "text": "Open it."}
FILE = {"type": "file", "file": {"filename": "a.txt", "file_data": "aGk="}}
ASKED = {"messages": [{"role": "user", "content": "Open it."}], "max_tokens": 20}
OPENAI_MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [TEXT, FILE], "name": "Ann"},
    {"role": "assistant", "content": "Now.", "reasoning": "Hm.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "Done.", "error": {"message": "No."}},
]
RESPONSE_ITEMS = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Open it."}]},
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]},
    {"type": "function_call", "call_id": "c", "name": "open", "arguments": "{}", "namespace": "n"},
    {"type": "function_call_output", "call_id": "c", "output": "Done."},
    {"type": "web_search_call", "id": "w", "action": {"query": "x"}, "results": []},
]
ANTHROPIC_MESSAGES = [
    {"role": "user", "content": [TEXT]},
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "Hm."},
        {"type": "tool_use", "id": "c", "name": "open", "input": {"door": "red"}},
    ]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "c", "content": [TEXT], "is_error": True},
        {"type": "document", "source": {"type": "text", "data": "x"}, "title": "y"},
        {"type": "search_result", "source": "x", "content": [TEXT]},
    ]},
]  # fmt: skip
SAMPLING = {
    "temperature": 0.5, "top_p": 0.5, "top_k": 5, "min_p": 0.1, "seed": 5, "n": 1, "stop": ["x"],
    "xtc_probability": 0.5, "xtc_threshold": 0.1, "max_completion_tokens": 20,
    "frequency_penalty": 1, "presence_penalty": 1, "repetition_penalty": 1.1,
    "frequency_context_size": 9, "presence_context_size": 9, "repetition_context_size": 9,
    "logit_bias": {"5": 1}, "model": "m", "full_cache": False, "unknown": 1,
    "stream": False, "stream_options": {"include_usage": True},
}  # fmt: skip
OTHER_FIELDS = {
    "reasoning_effort": "low", "reasoning": {"effort": "low", "max_tokens": 9}, "think": True,
    "enable_thinking": True, "thinking": {"type": "enabled", "budget_tokens": 9}, "audio": None,
    "chat_template_kwargs": {"x": 1}, "continue_final_message": True, "modalities": ["text"],
    "logprobs": True, "top_logprobs": 2, "parallel_tool_calls": False,
    "context_management": {"edits": [{"keep": "all"}]},
}  # fmt: skip
RESPONSES_FIELDS = {
    "tools": [TOOL, SEARCH, {"type": "namespace", "name": "n", "tools": [{"type": "custom", **OPEN}]}],
    "tool_choice": {"type": "custom", "name": "open"}, "text": {"format": FORMAT}, "model": "m",
    "reasoning": {"effort": "low"}, "metadata": {"a": 1}, "temperature": 0.5, "top_p": 0.5,
    "stream": False, "store": False, "background": False, "previous_response_id": None,
}  # fmt: skip
ANTHROPIC_FIELDS = {
    "tools": [{"name": "open", "input_schema": DOOR}, SEARCH], "stop_sequences": ["x"],
    "tool_choice": {"type": "tool", "name": "open", "disable_parallel_tool_use": True},
    "output_config": {"format": FORMAT, "effort": "low"}, "output_format": FORMAT, "model": "m",
    "thinking": {"type": "enabled", "budget_tokens": 9}, "temperature": 0.5, "top_p": 0.5,
    "top_k": 5, "stream": False,
}  # fmt: skip
# Valid bodies, which together have every field.
EXAMPLES = [
    (ChatBody, ASKED | {"messages": OPENAI_MESSAGES}),
    (ChatBody, ASKED | {"tools": [TOOL, SEARCH], "tool_choice": CHOICE}),
    (ChatBody, ASKED | {"tools": [TOOL], "tool_choice": ALLOWED, "response_format": FORMAT}),
    (ChatBody, ASKED | {"functions": [OPEN], "function_call": {"name": "open"}}),
    (ChatBody, ASKED | SAMPLING),
    (ChatBody, ASKED | OTHER_FIELDS),
    (CompletionBody, {"prompt": "Open it.", "echo": False, "logprobs": 1} | SAMPLING),
    (ResponsesBody, {"input": RESPONSE_ITEMS, "instructions": [TEXT]}),
    (ResponsesBody, {"input": "Open it.", "max_output_tokens": 20} | RESPONSES_FIELDS),
    (MessagesBody, ASKED | {"messages": ANTHROPIC_MESSAGES, "system": [TEXT]}),
    (MessagesBody, ASKED | ANTHROPIC_FIELDS),
    (CountedMessages, {"messages": ANTHROPIC_MESSAGES, "system": "Be brief."}),
]


def with_odd_value(value):
    """Yield copies of a JSON value in which it or one value inside it is odd."""
    yield from ODD_VALUES
    items = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, item in items:
        for odd_item in with_odd_value(item):
            changed = value.copy()
            changed[key] = odd_item
            yield changed


def read(model, value, tokenizer):
    """Do what the server does with a body before the model runs."""
    body = validate_body(model, value)
    if isinstance(body, ResponsesBody):  # the response repeats fields
        for event in ResponsesFormatter("m", body).begin():
            assert b"NaN" not in event.encode()
    if isinstance(body, CompletionBody):
        bodies = body.split_prompts()
    else:
        bodies = [body if isinstance(body, ChatBody) else body.as_chat_body()]
    for completion_body in bodies:
        completion_request(completion_body, tokenizer, Defaults())


@pytest.mark.parametrize(("model", "example"), EXAMPLES)
def test_a_value_of_any_type_is_read_or_refused(agent, model, example):
    tokenizer = agent.engine.loaded.tokenizer
    read(model, example, tokenizer)
    for odd in with_odd_value(example):
        try:
            read(model, odd, tokenizer)
        except Exception as error:
            refusal = as_api_error(error, request_id="")
            assert refusal.status_code < 500, (odd, error)
            assert refusal.detail.encode()
