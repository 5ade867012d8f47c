"""What the soak calls wrong."""

import contextlib
import http.server
import json
import os
import random
import threading

import httpx
import pytest

from scripts.results_page import look
from scripts.soak_server import ask, grown

MB = 1_000_000


def looks(*memory, more=0):
    return [{"memory": n * MB, "files": 16 + more * (i > 50)} for i, n in enumerate(memory)]


def test_memory_may_grow_while_caches_fill_and_not_after():
    filling = range(100, 130)
    assert grown(looks(*filling, *[130] * 60)) == []
    assert grown(looks(*filling, *[130] * 30, *[150] * 30)) == [
        "memory: from 130,000,000 to 150,000,000"
    ]
    assert grown(looks(*[100] * 90, more=40)) == ["files: from 16 to 56"]


def test_a_process_is_looked_at():
    found = look(os.getpid())
    assert found["memory"] > 10 * MB and found.get("files", 3) > 2


@contextlib.contextmanager
def answering(status, body):
    """A server that answers so, whatever is asked."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args): ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    "kind, status, body, wrong",
    [
        ("bad", 400, {"error": {"message": "m"}}, False),
        ("bad", 400, {"detail": "m"}, True),
        ("bad", 500, {"error": {"message": "m"}}, True),
        ("good", 400, {"error": {"message": "m"}}, True),
        ("good", 200, {"error": {"message": "m"}}, True),  # or a stream without an end
    ],
)
def test_what_a_server_may_not_answer(kind, status, body, wrong):
    with answering(status, body) as url, httpx.Client(base_url=url) as client:
        assert bool(ask(client, kind, random.Random(2))) is wrong
