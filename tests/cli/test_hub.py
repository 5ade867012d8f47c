"""Repositories on the Hugging Face Hub are planned from a few bytes, or rejected with the reason."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from mlx_snapkv.demo import MODELS

UNSAFE = "somebody/unsafe"  # this repository has no safetensors


class Hub(BaseHTTPRequestHandler):
    """A hub that serves `files` as the real one does, and rejects the repositories in `refusals`."""

    def do_GET(self):
        hub, name = self.server, self.path.rpartition("/resolve/main/")[2]
        data, status = hub.files.get(name, b""), 200
        if UNSAFE in self.path and name.endswith(".safetensors"):
            data = b""
        refusal = next((why for repo, why in hub.refusals.items() if repo in self.path), None)
        headers = {"ETag": '"an etag"', "X-Repo-Commit": "a" * 40}
        if self.path.startswith("/api/models/") and "/resolve/" not in self.path:
            data = json.dumps({"id": "somebody/big", "sha": "a" * 40}).encode()
        if refusal or not data:
            status, headers["X-Error-Code"] = refusal or (404, "EntryNotFound")
            data = b""
        elif part := self.headers.get("Range"):
            first, _, last = part.removeprefix("bytes=").partition("-")
            headers["Content-Range"] = f"bytes {first}-{last or len(data) - 1}/{len(data)}"
            status, data = 206, data[int(first) : int(last) + 1 if last else None]
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            hub.sent += len(data)
            self.wfile.write(data)

    do_HEAD = do_GET


@pytest.fixture
def hub():
    """Yield a hub that serves the built-in model's configuration and headers, with zeros as weights, under any name."""
    folder = MODELS["demo"]
    weights = (folder / "model.safetensors").read_bytes()
    header = weights[: 8 + int.from_bytes(weights[:8], "little")]
    with HTTPServer(("127.0.0.1", 0), Hub) as server:
        server.files = {
            "config.json": (folder / "config.json").read_bytes(),
            "model.safetensors": header + bytes(len(weights) - len(header)),
        }
        server.sent, server.refusals = 0, {}
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


# Several command lines run in one process, because importing the package takes longer than all of them.
EACH = """
import contextlib, io, json, sys
from mlx_snapkv.cli.app import main
found = []
for sys.argv in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as done:
            found.append((done.code, out.getvalue(), err.getvalue()))
print(json.dumps(found))
"""


def run(commands, cache, endpoint=None, offline="0"):
    """Run commands in a process with its own environment variables. Return (exit code, stdout, stderr) of each."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": f"http://127.0.0.1:{endpoint.server_port if endpoint else 9}",
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_OFFLINE": offline,
        "HF_HUB_DISABLE_XET": "1",
    }
    lines = json.dumps([["mlx-snapkv", *command.split()] for command in commands])
    words = [sys.executable, "-c", EACH, lines]
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def refused(cache, *names, **how):
    """Assert that every model is rejected in one line, and return the lines."""
    found = run([f"generate -p x --model {name}" for name in names], cache, **how)
    assert [(code, out, err.count("\n")) for code, out, err in found] == [(2, "", 1)] * len(names)
    return [err for _, _, err in found]


def cached(cache, name, config):
    """Write a repository to the local cache with nothing but its configuration."""
    snapshot = cache / f"models--somebody--{name}" / "snapshots" / "0123456789abcdef"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(config))
    (refs := snapshot.parents[1] / "refs").mkdir()
    (refs / "main").write_text(snapshot.name)


def test_without_a_network_only_the_local_cache_is_used(tmp_path):
    config = {"model_type": "glm", "rope_parameters": {"partial_rotary_factor": 0.5}}
    cached(tmp_path, "small", {})
    cached(tmp_path, "rotated", config)
    nothing, small, rotated = refused(
        tmp_path, "nobody/nothing", "somebody/small", "somebody/rotated"
    )
    assert "the Hugging Face hub can't be reached, and the local cache does not hold it" in nothing
    assert "has no weights" in small  # the cached configuration is used
    assert "has no partial_rotary_factor" in rotated
    assert "HF_HUB_OFFLINE" in refused(tmp_path, "nobody/nothing", offline="1")[0]


def test_a_refusal_of_the_hub_is_one_line_with_the_reason(hub, tmp_path):
    hub.refusals = {"nobody/nothing": (404, "RepoNotFound"), "nobody/gated": (403, "GatedRepo")}
    nothing, gated = refused(tmp_path, *hub.refusals, endpoint=hub)
    assert "the Hugging Face hub has no such repository" in nothing
    assert "the repository is gated: request access" in gated


def test_a_repository_is_planned_without_its_weights(hub, tmp_path):
    plans = (
        "plan --context 4k --memory 16GB --json --model somebody/big",
        f"plan --context 4k --model {UNSAFE}",
    )
    (code, out, err), unsafe = run(plans, tmp_path, hub)
    assert code == 0, err
    found = json.loads(out)
    size = len(hub.files["model.safetensors"])
    assert found["weights"] == pytest.approx(size, rel=0.02)
    assert hub.sent < size / 4 and not list(tmp_path.rglob("*.safetensors"))
    assert "somebody/big" in found["taken"][0]["command"]
    assert unsafe[:2] == [2, ""] and unsafe[2].count("\n") == 1 and "safetensors" in unsafe[2]
