"""The recipes in docs/server.md work as printed, except for the port."""

import json
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from page_helpers import serving

from mlx_snapkv.demo.questions import make_haystack

PAGE = Path(__file__).parents[2] / "docs" / "server.md"


@pytest.fixture(scope="module")
def recipes():
    """Yield a function that returns the page's code blocks in a language, with a running server's address."""
    with serving() as (url, _):
        text = PAGE.read_text(encoding="utf-8").replace("http://127.0.0.1:8080", url)
        yield lambda language: re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


def test_python(recipes, demo_llama, tmp_path, monkeypatch, capsys):
    document, _ = make_haystack(demo_llama[1], random.Random(0), 3, 2048)  # the demo's document
    (tmp_path / "story.txt").write_text(document)
    monkeypatch.chdir(tmp_path)
    names = {}
    for code in recipes("python"):
        exec(compile(code, PAGE.name, "exec"), names)
    assert json.loads(names["answer"].choices[0].message.content).keys() == {"town", "people"}
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("6475938 {") and "'kv_bytes_after'" in first
    answer, known = second.split()
    assert answer == "157815" and int(known) > 2048 - 256  # tokens that vote are read again


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_curl(recipes):
    chat, others = (block for block in recipes("bash") if block.startswith("curl"))
    events = re.findall("^data: ({.*)", bash(chat), re.M)
    *chunks, last = map(json.loads, events)
    said = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert said.strip() == "481516" and last["usage"]["completion_tokens"] > 1
    told = bash(others)
    assert told.startswith('{"status":"ok"}') and "mlx_snapkv_open_requests 0" in told


def bash(script):
    return subprocess.check_output(["bash", "-ec", script], text=True, timeout=60)
