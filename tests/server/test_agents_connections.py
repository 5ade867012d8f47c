"""How agents and apps connect to a server: compressed bodies, base URLs, host names."""

import gzip
import json
import socket
import zlib

from acting_server import CHAT, TEXT
from agent_messages import user
from server_helpers import serving


def test_compressed_bodies_are_read_or_refused(served):
    body = json.dumps({"prompt": "The key of", "max_tokens": 2}).encode()
    for name, data in (("gzip", gzip.compress(body)), ("deflate", zlib.compress(body))):
        headers = {"Content-Encoding": name}
        assert served.post(TEXT, content=data, headers=headers).status_code == 200
    for name, data, status in (
        ("gzip", body, 400),
        ("gzip", gzip.compress(body)[:-9], 400),
        ("gzip", gzip.compress(b" " * (40 << 20)), 413),
        ("br", body, 415),
        ("gzip, gzip", body, 415),
    ):
        found = served.post(TEXT, content=data, headers={"Content-Encoding": name})
        assert found.status_code == status, (name, found.text)
        assert found.json()["error"]["message"]


def test_base_urls_may_have_no_v1_or_two(served):
    hello = {"messages": [user("Hello")], "max_tokens": 2}
    for path in ("/chat/completions", "/v1/v1/messages", "/messages", "/v1/chat/completions/"):
        assert served.post(path, hello).status_code == 200, path
    for path in ("/models", "/v1/v1/models", "/"):
        assert served.client.get(path).status_code == 200
        head = served.client.head(path)
        assert head.status_code == 200 and not head.content
    assert served.client.head(CHAT).status_code == 405


def test_a_request_target_may_be_an_absolute_url(served):
    port = int(served.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.sendall(
            b"GET http://localhost/v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        )
        assert client.recv(1000).startswith(b"HTTP/1.1 200 ")


def test_a_host_that_is_not_allowed_names_the_flag_that_allows_it(served):
    hello, name = {"prompt": "The key of", "max_tokens": 2}, "host.docker.internal"
    headers = {"Host": f"{name}:8080"}
    refused = served.post(TEXT, hello, headers=headers)
    assert refused.status_code == 403 and f"--allow-host {name}" in refused.text
    with serving(hosts=(name,)) as allowing:
        for own in (headers, headers | {"Origin": f"http://{name}:8080"}, {"Host": name.upper()}):
            assert allowing.post(TEXT, hello, headers=own).status_code == 200
        assert allowing.post(TEXT, hello, headers={"Host": "evil.example"}).status_code == 403
