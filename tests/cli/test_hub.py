"""Repositories of the Hugging Face hub: planned from few bytes, and refused with the reason."""

import json
import os
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from command_lines import MODULE

from mlx_snapkv.demo import MODELS


class Hub(BaseHTTPRequestHandler):
    """The files of the server's `files`, as the real hub sends them, or its `refusal` of every request."""

    def do_GET(self):
        hub, name = self.server, self.path.rpartition("/resolve/main/")[2]
        data, status = hub.files.get(name, b""), 200
        headers = {"ETag": '"an etag"', "X-Repo-Commit": "a" * 40}
        if self.path.startswith("/api/models/") and "/resolve/" not in self.path:
            data = json.dumps({"id": "somebody/big", "sha": "a" * 40}).encode()
        if hub.refusal or not data:
            status, headers["X-Error-Code"] = hub.refusal or (404, "EntryNotFound")
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
    """A hub with one repository: the embedded model's configuration and headers, and weights of zeros."""
    folder = MODELS["demo"]
    weights = (folder / "model.safetensors").read_bytes()
    header = weights[: 8 + int.from_bytes(weights[:8], "little")]
    with HTTPServer(("127.0.0.1", 0), Hub) as server:
        server.files = {
            "config.json": (folder / "config.json").read_bytes(),
            "model.safetensors": header + bytes(len(weights) - len(header)),
        }
        server.sent, server.refusal = 0, None
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def run(command, cache, endpoint, name, offline="0"):
    """The command in a process of its own, which alone reads these variables."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": f"http://127.0.0.1:{endpoint.server_port if endpoint else 9}",
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_OFFLINE": offline,
        "HF_HUB_DISABLE_XET": "1",
    }
    words = [*MODULE, *command.split(), "--model", name]
    return subprocess.run(words, capture_output=True, text=True, env=environment)


def refused(cache, endpoint=None, name="nobody/nothing", command="generate -p x", **how):
    """What is said on stderr."""
    done = run(command, cache, endpoint, name, **how)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    return done.stderr


def test_without_a_network_the_local_cache_is_all_there_is(tmp_path):
    reached = "the Hugging Face hub can't be reached, and the local cache does not hold it"
    assert reached in refused(tmp_path / "none")
    assert "HF_HUB_OFFLINE" in refused(tmp_path / "none", offline="1")
    snapshot = tmp_path / "models--somebody--small" / "snapshots" / "0123456789abcdef"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (refs := snapshot.parents[1] / "refs").mkdir()
    (refs / "main").write_text(snapshot.name)
    assert "has no weights" in refused(tmp_path, name="somebody/small")  # what is cached is used
    config = {"model_type": "glm", "rope_parameters": {"partial_rotary_factor": 0.5}}
    (snapshot / "config.json").write_text(json.dumps(config))
    assert "has no partial_rotary_factor" in refused(tmp_path, name="somebody/small")


def test_what_the_hub_refuses(hub, tmp_path):
    for hub.refusal, words in (
        ((404, "RepoNotFound"), "the Hugging Face hub has no such repository"),
        ((403, "GatedRepo"), "the repository is gated: request access"),
    ):
        assert words in refused(tmp_path, hub)


def test_a_repository_is_planned_without_its_weights(hub, tmp_path):
    done = run("plan --context 4k --memory 16GB --json", tmp_path, hub, "somebody/big")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    size = len(hub.files["model.safetensors"])
    assert found["weights"] == pytest.approx(size, rel=0.02)
    assert hub.sent < size / 4 and not list(tmp_path.rglob("*.safetensors"))
    assert "somebody/big" in found["taken"][0]["command"]
    del hub.files["model.safetensors"]
    assert "safetensors" in refused(tmp_path / "other", hub, "somebody/big", "plan --context 4k")
