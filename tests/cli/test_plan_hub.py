"""A repository is planned from its configuration and the headers of its weights, which are all that is downloaded."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from mlx_snapkv.demo import MODELS


class Hub(BaseHTTPRequestHandler):
    """The files of the server's `files`, as the real hub sends them."""

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        name = self.path.rpartition("/resolve/main/")[2]
        if self.path.startswith("/api/models/") and "/resolve/" not in self.path:
            return self._send(200, json.dumps({"id": "somebody/big", "sha": "a" * 40}).encode())
        if name not in self.server.files:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        data = self.server.files[name]
        start, _, stop = self.headers.get("Range", "").removeprefix("bytes=").partition("-")
        if not start:
            return self._send(200, data)
        part = data[int(start) : int(stop) + 1] if stop else data[int(start) :]
        span = f"bytes {start}-{int(start) + len(part) - 1}/{len(data)}"
        return self._send(206, part, {"Content-Range": span})

    def _send(self, status, data, headers=None):
        self.send_response(status)
        known = {"ETag": f'"{self.path[-5:]}"', "X-Repo-Commit": "a" * 40}
        for name, value in {**known, **(headers or {}), "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.server.sent += len(data)
            self.wfile.write(data)

    def log_message(self, *args):
        pass


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
        server.sent = 0
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def planned(hub, tmp_path, name):
    environment = {
        **os.environ,
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_HUB_CACHE": str(tmp_path),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
    }
    command = [
        sys.executable,
        "-m",
        "mlx_snapkv",
        "plan",
        "--context",
        "4k",
        "--json",
        "--model",
        name,
    ]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_a_repository(hub, tmp_path):
    done = planned(hub, tmp_path, "somebody/big")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    size = len(hub.files["model.safetensors"])
    assert found["weights"] == pytest.approx(size, rel=0.02)
    assert hub.sent < size / 4 and not list(tmp_path.rglob("*.safetensors"))
    assert "somebody/big" in found["taken"][0]["command"]


def test_a_repository_without_safetensors(hub, tmp_path):
    del hub.files["model.safetensors"]
    done = planned(hub, tmp_path, "somebody/big")
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1
    assert "safetensors" in done.stderr
