import json
import re

import pytest
from batch_file_helpers import COMPLETIONS, FACT, SNAPKV, answer, chat, line, said, text, write

KEYDIFF = "keydiff:budget=64,block=64"
DEMO = ["--model", "demo"]


@pytest.mark.parametrize("policy", ["none", f"{KEYDIFF} then {SNAPKV}"])
def test_requests_of_every_kind_are_answered_together(batch, demo_llama, policy):
    ids = demo_llama[1].encode(FACT * 9 + "The access code of the amber falcon is")
    parts = [
        {"type": "text", "text": FACT},
        {"type": "text", "text": "What is the access code of the amber falcon?"},
    ]
    user = {"role": "user", "content": parts}
    xtc = {"temperature": 2, "xtc_probability": 1, "xtc_threshold": 0, "seed": -1}
    asked = [  # requests with their answers
        *((chat(f"chat {n}", 7 * n, max_tokens=6, metadata={"x": 1}), "482913") for n in range(4)),
        *((text(f"text {n}", 9 * n, max_completion_tokens=4, max_tokens=1), " 4829") for n in range(3)),
        (line("ids", COMPLETIONS, prompt=ids, max_tokens=6, model="gpt-5"), " 482913"),
        (line("parts", messages=[user], max_tokens=6), "482913"),
        (text("stop", 20, max_tokens=30, stop=["913", "never"]), " 482"),
        (text("bias", 20, max_tokens=3, logit_bias={str(ids[-1]): 100.0}), " is is is"),
        (text("top_k", 3, max_tokens=6, temperature=2, top_k=1), " 482913"),
    ]  # fmt: skip
    requests = [request for request, _ in asked] + [text("xtc", 3, max_tokens=6, top_k=1, **xtc)]
    code, found, err = batch(requests, "--concurrency", "5", "--policy", policy)
    assert code == 0 and re.search(
        r"13 answered in \S+a\.jsonl \| \d+ prompt tokens, \d+ answer", err
    )
    answers = {name: answer(record) for name, record in found.items()}
    assert answers.pop("xtc") != " 482913"  # the likely tokens are excluded
    assert answers == {request["custom_id"]: expected for request, expected in asked}
    # The records have OpenAI's fields.
    record, response = found["chat 3"], found["chat 3"]["response"]
    assert set(record) == {"id", "custom_id", "response", "error"} and record["error"] is None
    assert set(response) == {"status_code", "request_id", "body"} and response["status_code"] == 200
    body, other = response["body"], found["text 2"]["response"]["body"]
    assert (body["object"], other["object"]) == ("chat.completion", "text_completion")
    assert (body["model"], other["usage"]["completion_tokens"]) == ("demo", 4)
    ours = body["mlx_snapkv"]
    assert ours["policy"] == (None if policy == "none" else policy)
    assert ours["ignored"] == ["metadata"]
    assert len({record["id"], found["text 2"]["id"], body["id"], other["id"]}) == 4


@pytest.mark.parametrize("policy", ["none", SNAPKV])
def test_each_request_has_its_own_response_format(batch, policy):
    kinds = {"integer": int, "boolean": bool, "array": list, "object": dict, "string": str}
    requests = [
        chat(kind, 9 * n, max_tokens=30, response_format=as_schema({"type": kind}))
        for n, kind in enumerate(kinds)
    ]
    free = chat("free", 3, max_tokens=6)
    bad = chat("bad", 3, response_format=as_schema({"contains": {}}))
    _, found, _ = batch([*requests, free, bad], "--policy", policy)
    for kind, python in kinds.items():
        assert isinstance(json.loads(answer(found[kind])), python)
    assert answer(found["free"]) == "482913"
    assert "response_format's schema can't be enforced" in found["bad"]["error"]["message"]


def as_schema(schema):
    return {"type": "json_schema", "json_schema": {"schema": schema}}


def test_flags_are_the_defaults_of_requests_and_a_seed_makes_runs_reproducible(batch, tmp_path):
    requests = [text(f"{n}", 3) for n in range(3)] + [text("own", 3, temperature=0, max_tokens=3)]
    options = ["-m", "9", "--temp", "3", "--top-k", "40", "--seed", "5"]
    _, found, _ = batch(requests, *options)
    answers = {name: answer(record) for name, record in found.items()}
    assert answers["own"] == " 482" and len(set(answers.values())) == 4
    assert {r["response"]["body"]["usage"]["completion_tokens"] for r in found.values()} == {3, 9}
    (tmp_path / "a.jsonl").unlink()
    _, again, _ = batch(requests[::-1], *options, "--concurrency", "1")
    assert {name: answer(record) for name, record in again.items()} == answers


@pytest.mark.parametrize(
    "options, words",
    [
        (
            ["--policy", SNAPKV.replace("lookahead=4", "lookahead=0"), "--kv-bits", "8"],
            {"kv_bits": 8},
        ),
        (
            ["--sparse", "top_k=24", "--store", "8bit"],
            {"policy": "sparse:top_k=24,store=8bit"},
        ),
    ],
)
def test_bits_and_store_of_the_command_apply_to_all_requests(batch, options, words):
    _, found, _ = batch([chat("a", 24, max_tokens=8)], *options)
    ours = found["a"]["response"]["body"]["mlx_snapkv"]
    assert answer(found["a"]) == "482913" and words.items() <= ours.items()


# Mistakes in the lines of the file. Mistakes in bodies are in tests/completions and tests/server.
BAD = [
    ("not JSON", "is not JSON"),
    (b'{"custom_id": "\xff"}', "is not UTF-8"),
    ("[" * 100_000, "is not JSON"),
    ("[1]", "is not an object"),
    ({"url": COMPLETIONS, "body": {"prompt": "x"}}, "custom_id is missing"),
    ({"custom_id": 7}, "custom_id must be text, got '7'"),
    (chat("good", 1), "custom_id 'good' is line 1's already"),
    ({**chat("get", 1), "method": "GET"}, "method must be POST, got 'GET'"),
    (line("url", "/v1/embeddings"), "url must be /v1/chat/completions or /v1/completions, got"),
    ({"custom_id": "bodiless", "url": COMPLETIONS}, "body must be an object, got None"),
    (line("silent"), "messages is missing"),
    (chat("streams", 1, stream=True), "stream must be false"),
]


def test_bad_lines_become_error_lines_and_the_rest_is_answered(call, tmp_path):
    lines = [chat("good", 1, max_tokens=6), *(bad for bad, _ in BAD), "", chat("last", 2)]
    file, output = write(tmp_path / "r.jsonl", lines), tmp_path / "a.jsonl"
    args = ["batch", str(file), "-o", str(output), *DEMO, "--policy", SNAPKV]
    code, out, err = call(*args)
    assert (code, out) == (1, "") and f"2 answered, {len(BAD)} errors in " in err
    records = [json.loads(raw) for raw in output.read_text().splitlines()]
    errors = {r["error"]["line"]: r["error"]["message"] for r in records if r["response"] is None}
    for number, (_, words) in enumerate(BAD, start=2):
        message = errors[number]
        assert message.startswith(f"line {number}: ") and words in message and "\n" not in message
    assert {r["custom_id"] for r in records if not r["error"]} == {"good", "last"}
    before = output.read_bytes()
    code, _, err = call(*args, "--allow-errors")
    assert code == 0 and output.read_bytes() == before
    assert f"({len(lines) - 1} of them from earlier runs)" in err


def test_progress_on_a_terminal(terminal, tmp_path):
    file = write(tmp_path / "r.jsonl", [chat(f"{n}", n) for n in range(5)])
    said = terminal("batch", str(file), "-o", f"{file}.a", *DEMO, COLUMNS="120").leave("")
    assert "answering" in said and "5/5" in said and "prompts " in said


def test_kv_memory_is_limited_and_a_useless_policy_is_reported_at_the_end(batch):
    requests = [text(name, n, max_tokens=4) for name, n in (("small", 5), ("large", 300), ("b", 6))]
    options = ["--policy", "keydiff:budget=95%,block=64", "--max-kv-bytes", "2.5MB"]
    code, found, err = batch(requests, *options)
    assert code == 1
    assert [answer(found[name]) for name in ("small", "b")] == [" 4829", " 4829"]
    message = said(found["large"])["message"]
    assert re.search(r"need [\d.]+ MB of KV memory, and max_kv_bytes is 2.5 MB: raise it", message)
    warning = "the entries kept take more memory than the full cache would (2 of 2 answers)"
    assert err.splitlines()[-1] == f"warning: {warning}"
