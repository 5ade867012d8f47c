"""How agents and apps connect to a server: compressed bodies, base URLs, host names."""

import gzip
import json
import re
import socket
import zlib

import anthropic
import openai
import pytest
from acting_server import CHAT, TEXT
from agent_messages import user
from server_helpers import connected, serving


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


def exchanged(served, path, body):
    """Send a request, close the sending side, and return everything that the server sends."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    port = int(served.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(head.encode() + data)
        client.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: client.recv(65536), b""))


def test_a_client_that_shuts_down_its_sending_side_is_answered(served):
    long = {"prompt": "The key of", "max_tokens": 300, "logit_bias": {"1": -100}}
    for body in ({"prompt": "The key of", "max_tokens": 2}, long, long | {"stream": True}):
        head, _, answer = exchanged(served, TEXT, body).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        if body.get("stream"):
            assert answer.count(b"data: ") > 3 and b"data: [DONE]" in answer
        else:
            assert json.loads(answer)["choices"][0]["text"]
    assert exchanged(served, TEXT, {"prompt": 5}).startswith(b"HTTP/1.1 400 ")


def test_a_host_that_is_not_allowed_names_the_flag_that_allows_it(served):
    hello, name = {"prompt": "The key of", "max_tokens": 2}, "host.docker.internal"
    headers = {"Host": f"{name}:8080"}
    refused = served.post(TEXT, hello, headers=headers)
    assert refused.status_code == 403 and f"--allow-host {name}" in refused.text
    for host, advised in (("[fd00::1]:80", "[fd00::1]"), ("a[b", "NAME")):
        refused = served.post(TEXT, hello, headers={"Host": host})
        assert refused.status_code == 403 and f"--allow-host {advised}" in refused.text
    with serving(hosts=(name,)) as allowing:
        for own in (headers, headers | {"Origin": f"http://{name}:8080"}, {"Host": name.upper()}):
            assert allowing.post(TEXT, hello, headers=own).status_code == 200
        assert allowing.post(TEXT, hello, headers={"Host": "evil.example"}).status_code == 403


def test_each_response_has_the_number_of_its_request(served):
    openais = connected(openai.OpenAI, served, "/v1")
    anthropics = connected(anthropic.Anthropic, served)
    hello = [user("Hello")]
    answers = [
        openais.chat.completions.create(model="m", messages=hello, max_tokens=2),
        openais.responses.create(model="m", input="Hello", max_output_tokens=16),
        anthropics.messages.create(model="m", messages=hello, max_tokens=2),
    ]
    with pytest.raises(anthropic.BadRequestError) as refused:
        anthropics.messages.create(model="m", messages=[], max_tokens=2)
    with openais.completions.with_streaming_response.create(
        model="m", prompt="The", stream=True, max_tokens=2
    ) as streamed:
        numbers = [answer._request_id for answer in answers]
        numbers += [refused.value.request_id, streamed.headers["x-request-id"]]
    assert all(re.fullmatch("req_[0-9a-f]{24}", number) for number in numbers)
    assert len(set(numbers)) == len(numbers)


def test_the_model_has_the_fields_of_anthropics_client(served):
    page = connected(anthropic.Anthropic, served).models.list()
    (model,) = page.data
    assert (page.has_more, page.first_id, page.last_id) == (False, "demo", "demo")
    assert (model.type, model.display_name) == ("model", "demo")
    assert model.max_input_tokens > 1000 and model.created_at.year > 2020
