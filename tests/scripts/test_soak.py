"""A short soak test: two sessions on a built-in model, which calls tools only if forced."""

import pytest
import soak
from mlx_lm import load
from soak_apis import TOOLS
from soak_models import CALLS, write_folder
from soak_session import TOO_LONG, Sent, Session

from mlx_snapkv.completions.tool_calls import format_name
from mlx_snapkv.demo import MODELS


def test_two_sessions_for_ten_seconds(capsys):
    words = "--sessions 2 --max-growth 2 --max-context 700 --prefix-bytes 3000000"
    args = soak.parser().parse_args(words.split())
    assert soak.soak("demo", "mistral", 10, args) == []
    said = capsys.readouterr().out
    assert said.count("  ok: ") == 7 and "FAILED" not in said
    assert "0 of 0 " not in said.partition("JSON answers")[2]


def test_a_failed_check_is_reported(tmp_path):
    sessions = [Session(0, 0)]
    failing = soak.Soak(tmp_path, [], 10, 1, sessions)
    sessions[0].sent += [
        Sent("/v1/messages", {}, 400, error=TOO_LONG),
        Sent("/v1/messages", {}, 500, error="the server failed"),
    ]
    failing._check_requests()
    failing._check_prefixes(11)
    failing._check_memory(
        [soak.Reading(100, 30, 20, 0, 1)] * 4, [soak.Reading(110, 40, 0, 10, 1)] * 9
    )
    failing._check_idle(soak.Reading(110, 40, 0, 10, 1))
    found = " ".join(failing.failures)
    assert "1 of 2 requests failed" in found and "11 B of 10 B" in found
    assert "grew to 1.20" in found and "1 requests, 0 bytes of requests are left" in found


@pytest.mark.parametrize("tool_format", CALLS)
def test_a_template_writes_calls_in_its_format(tmp_path, tool_format):
    write_folder(MODELS["demo"], tool_format, tmp_path / "model")
    _, tokenizer = load(str(tmp_path / "model"))
    assert format_name(tokenizer.tool_parser) == tool_format
    function = {"name": "edit", "arguments": {"path": "a b", "line": 3, "text": "  x"}}
    call = {"id": "1", "type": "function", "function": function}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    text = tokenizer.apply_chat_template(messages, tools=None, tokenize=False)
    _, _, inner = text.partition(tokenizer.tool_call_start)
    end = tokenizer.tool_call_end or "<|end|>"
    tools = [{"type": "function", "function": tool} for tool in TOOLS]
    parsed = tokenizer.tool_parser(inner.partition(end)[0].strip(), tools)
    (found,) = parsed if isinstance(parsed, list) else [parsed]
    assert (found["name"], found["arguments"]["path"]) == ("edit", "a b")
