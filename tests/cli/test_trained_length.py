"""A prompt longer than the model's trained length causes exactly one line of output."""

import json

import pytest
from model_folders import demo_with

LENGTH = 512
BEYOND = f"more than the model's trained length of {LENGTH}: answers may be wrong"


@pytest.fixture
def model(tmp_path):
    return ["--model", str(demo_with(tmp_path / "model", max_position_embeddings=LENGTH))]


@pytest.mark.parametrize("way", [[], ["--snapkv", "top_k=60"], ["--sparse", "budget=12.5%"]])
def test_each_command_says_it_once(call, text_file, tmp_path, model, way):
    book, (fact, *_) = text_file(tmp_path / "book.txt", 3 * LENGTH // 2, seed=2)
    asked = ["generate", *model, "--prompt-file", str(book), "--prompt", fact.question, "-m", "1"]
    code, _, err = call(*asked, *way)
    assert code == 0 and err.count(BEYOND) == 1 and "TrainedLengthWarning" not in err
    (line,) = [line for line in err.splitlines() if BEYOND in line]
    assert "rope_scaling" in line
    code, _, err = call("chat", *model, *way, "-m", "1", stdin=f"/file {book}\nWhy?\n".encode())
    assert code == 0 and err.count(BEYOND) == 1
    saved = ["--prompt-file", str(book), "-o", str(tmp_path / "x.safetensors")]
    code, _, err = call("cache-prompt", *model, *saved, *way)
    assert code == 0 and err.count(BEYOND) == 1


def test_a_batch_says_it_once(call, tmp_path, model):
    bodies = [{"messages": [{"role": "user", "content": "Why? " * n}]} for n in (5, 600, 700)]
    requests = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/chat/completions", "body": body}
        for i, body in enumerate(bodies)
    ]
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(map(json.dumps, requests)))
    output = ["-o", str(tmp_path / "answers.jsonl"), "--max-tokens", "1"]
    code, _, err = call("batch", str(path), *model, *output)
    assert code == 0 and err.count(BEYOND) == 1
