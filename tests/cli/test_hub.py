"""Repositories that can't be had: each reason is told as it is."""

import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

CACHED = "models--somebody--small/snapshots/0123456789abcdef"
COMMAND = [sys.executable, "-m", "mlx_snapkv", "generate", "-p", "x", "--model"]


def asked(cache, name="nobody/nothing", **environment):
    """What is said on stderr."""
    environment = {**os.environ, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "0", **environment}
    done = subprocess.run([*COMMAND, name], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    return done.stderr


@pytest.fixture
def cache(tmp_path):
    """A local cache with one repository, of which only the configuration is there."""
    (tmp_path / CACHED).mkdir(parents=True)
    (tmp_path / CACHED / "config.json").write_text("{}")
    refs = tmp_path / "models--somebody--small" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0123456789abcdef")
    return tmp_path


def test_offline_says_so_and_what_is_cached(cache):
    said = asked(cache, HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set, and the local cache holds no such repository" in said
    assert "(it has somebody/small)" in said


def test_no_network_says_so(cache, tmp_path):
    said = asked(tmp_path / "none", HF_ENDPOINT="http://127.0.0.1:9")
    assert (
        f"can't be reached, and the local cache holds no such repository ({tmp_path}/none" in said
    )
    said = asked(cache, "somebody/small", HF_ENDPOINT="http://127.0.0.1:9")
    assert "config.json names no model_type" in said  # what is cached is used


class Hub(BaseHTTPRequestHandler):
    """Refuses every request with the server's `refusal`, as the real hub words it."""

    def do_GET(self):
        status, code = self.server.refusal
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *args):
        pass


@pytest.mark.parametrize(
    "refusal, words",
    [
        ((404, "RepoNotFound"), "the Hugging Face hub has no such repository"),
        ((403, "GatedRepo"), "access has to be granted"),
    ],
)
def test_what_the_hub_refuses(tmp_path, refusal, words):
    with HTTPServer(("127.0.0.1", 0), Hub) as hub:
        hub.refusal = refusal
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        said = asked(tmp_path, HF_ENDPOINT=f"http://127.0.0.1:{hub.server_port}")
        hub.shutdown()
    assert words in said
