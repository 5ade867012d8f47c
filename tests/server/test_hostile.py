"""No request brings the server down: the client gets a 4xx in its API's format, and the next request is answered."""

import concurrent.futures
import contextlib
import json
import socket
import threading
import time
from types import SimpleNamespace

import httpx
import mlx.core as mx
import pytest
from bad_requests import BAD, BAD_HTTP, CHAT, HEAD, HELLO, RAW, TEXT
from server_helpers import load_named, serving
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from mlx_snapkv import SnapKVError
from mlx_snapkv.engine import loop_model
from mlx_snapkv.server import exchange
from mlx_snapkv.server.access import Gate, Settings
from mlx_snapkv.server.admission import Limits
from mlx_snapkv.server.metrics import Metrics


def assert_refused(response, status=range(400, 500), words=""):
    assert response.status_code in status, response.text[:300]
    error = response.json()["error"]
    is_anthropic = response.url.path.startswith("/v1/messages")
    assert set(error) == {"message", "type"} | (set() if is_anthropic else {"param", "code"})
    assert error["type"] and error["message"] and words in error["message"], error
    assert "Traceback" not in error["message"]


def assert_answers(served):
    assert served.post(CHAT, HELLO).json()["choices"][0]["message"]["content"]


def wait_until(is_so):
    until = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.01)


def no_request(served):
    return served.metric("mlx_snapkv_open_requests") + len(served.engine.batch.running) == 0


def test_good_clients_do_not_notice_bad_requests(served):
    hello = {"prompt": "The key of", "max_tokens": 100}
    wanted = served.post(TEXT, hello).json()["choices"][0]["text"]
    stop = threading.Event()

    def stream(_):
        answers = []
        while not stop.is_set() or not answers:
            with served.client.stream("POST", TEXT, json=hello | {"stream": True}) as response:
                events = [line[6:] for line in response.iter_lines() if line.startswith("data: {")]
            answers.append("".join(json.loads(e)["choices"][0]["text"] for e in events))
        return answers

    bad = [(path, json.dumps(body).encode(), words) for path, body, words in BAD]
    bad += [(CHAT, body, "") for body in RAW]
    bad.append((CHAT, b"", "the body is empty"))
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        streams = [pool.submit(stream, i) for i in range(2)]
        try:
            for path, body, words in bad:
                assert_refused(served.client.post(path, content=body), words=words)
        finally:
            stop.set()
        for answers in streams:
            assert set(answers.result()) == {wanted}


def connection(served):
    host, port = served.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=5)


def test_bad_http_is_refused(served):
    for data in BAD_HTTP:
        with connection(served) as sending:
            sending.sendall(data)
            found = b""
            while not found.endswith(b"}") and (part := sending.recv(65536)):
                found += part
        head, _, body = found.partition(b"\r\n\r\n")
        assert head.split()[1][:1] == b"4" and json.loads(body)["error"]["message"], data
    assert_answers(served)


def test_the_key_and_the_size_of_a_body_are_checked():
    with serving(api_key="secret", body_bytes=10_000) as served:
        assert served.client.get("/health").status_code == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            assert_refused(served.post(CHAT, HELLO, headers=headers), [401])
        assert_refused(served.client.options(CHAT), [401])
        assert served.client.options("/health").status_code == 405
        # A server with a key accepts every host name.
        for headers in ({"Authorization": "Bearer secret"}, {"x-api-key": "secret", "Host": "mac"}):
            assert served.post(CHAT, HELLO, headers=headers).status_code == 200
        # The second body is sent without a Content-Length.
        for content in (b" " * 20_000, (b" " * 1000 for _ in range(100))):
            assert_refused(served.client.post(CHAT, content=content, headers=headers), [413])


def test_a_page_of_another_site_may_not_ask(served):
    for host in ("evil.example:8080", "127.0.0.1.evil.example", ""):
        assert_refused(served.post(CHAT, HELLO, headers={"Host": host}), [403, 400])
    preflight = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    response = served.client.options(CHAT, headers=preflight)
    assert "access-control-allow-origin" not in response.headers
    for origin in ("http://evil.example", "http://localhost:3001"):
        refused = served.client.options(CHAT, headers=preflight | {"Origin": origin})
        assert_refused(refused, [403], "start the server with --allow-origin")
    for origin in ("null", "http://localhost.evil.example"):
        assert_refused(served.post(CHAT, HELLO, headers={"Origin": origin}), [403])
    assert served.post(CHAT, HELLO, headers={"Origin": served.url}).status_code == 200
    with serving(origins=("http://good.example",)) as open_to:
        answer = open_to.post(CHAT, HELLO, headers={"Origin": "http://good.example"})
        assert answer.headers["access-control-allow-origin"] == "http://good.example"
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        wish = {"Access-Control-Request-Private-Network": "true"}
        wish |= {"Access-Control-Request-Method": "POST"}
        good = open_to.client.options(CHAT, headers=wish | {"Origin": "http://good.example"})
        assert good.status_code == 200
        assert good.headers["access-control-allow-private-network"] == "true"
        evil = open_to.client.options(
            "/v1/messages", headers=wish | {"Origin": "http://evil.example"}
        )
        assert_refused(evil, [403], "start the server with --allow-origin")
        assert not [name for name in evil.headers if name.startswith("access-control")]
        assert evil.headers["request-id"].startswith("req_")
    for origin in ("good.example", "http://good.example/", "http://Good.example"):
        with pytest.raises(SnapKVError, match="--allow-origin must be"):  # no browser sends it
            Settings(origins=("null", origin))


def test_a_server_without_a_key_accepts_no_unknown_host():
    gate = Gate(PlainTextResponse("Fine."), Settings(host="::1"), Metrics())
    client = TestClient(gate, base_url="http://[::1]:8080")
    assert client.get("/").text == "Fine."
    for headers in ({"Host": ""}, {"Host": "evil.example"}, {"Origin": "null"}):
        assert_refused(client.get("/", headers=headers), [403])
    with pytest.raises(SnapKVError, match="--allow-host must be"):
        Settings(hosts=("[]",))
    with pytest.raises(SnapKVError, match="--api-key is empty"):  # from an unset shell variable
        Settings(api_key="")


def test_clients_that_leave_before_their_body_has_come_are_counted(served, caplog):
    """Invented paths are not counted by name, because every name would stay in memory."""
    assert_refused(served.post("/made-up", HELLO), [404])
    with connection(served) as sending:
        sending.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
        time.sleep(0.2)
    wait_until(lambda: f'path="{CHAT}",status="499"' in served.client.get("/metrics").text)
    assert "made-up" not in served.client.get("/metrics").text
    assert_answers(served)
    assert "failed" not in caplog.text


def test_too_many_requests_and_too_long_prompts_are_refused():
    with serving(limits=Limits(concurrency=1, queue=1, context=100)) as served:
        long = {"max_tokens": 9, "messages": [{"role": "user", "content": "word " * 200}]}
        for path in (CHAT, "/v1/messages"):
            response = served.post(path, long)
            assert_refused(response, [400], " tokens > 100 maximum")
            told = response.json()["error"]
            assert told["message"].startswith("prompt is too long: ")  # clients look for this
            assert told.get("code", "context_length_exceeded") == "context_length_exceeded"
        # The length is checked before the schema, which may take seconds.
        bad = {"type": "json_schema", "json_schema": {"schema": {"type": "thing"}}}
        assert_refused(served.post(CHAT, long | {"response_format": bad}), [400], " maximum;")
        slow = {"prompt": "The key of", "max_tokens": 100}
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            found = list(pool.map(lambda _: served.post(TEXT, slow), range(6)))
        refused = [r for r in found if r.status_code != 200]
        assert 0 < len(refused) <= 4 and int(refused[0].headers["Retry-After"]) > 0
        for each in refused:
            assert_refused(each, [429], "all 2 places for requests are taken")
        assert_answers(served)


def test_a_stream_that_waits_for_room_gets_keep_alive_lines(monkeypatch):
    monkeypatch.setattr(exchange, "KEEP_ALIVE_SECONDS", 0.5)
    with serving(limits=Limits(concurrency=1)) as served:
        short = {"prompt": "The key of", "max_tokens": 3, "stream": True}
        long = short | {"max_tokens": 3000, "logit_bias": {"1": -100}}
        with served.client.stream("POST", TEXT, json=long) as first:
            lines = first.iter_lines()
            assert next(lines)
            with served.client.stream("POST", TEXT, json=short) as second:
                waiting = second.iter_lines()
                assert next(waiting) == ": waiting"
                first.close()
                assert "data: [DONE]" in list(waiting)


@pytest.mark.parametrize("n_lines", [None, 0, 5])
def test_requests_of_clients_that_leave_are_dropped(served, n_lines):
    """The client leaves while the server generates a full answer, reads a prompt for a stream, or streams an answer."""
    body = {"prompt": "The key of " * 400, "max_tokens": 3000, "stream": n_lines is not None}
    timeout = 1 if n_lines is None else 60
    streaming = served.client.stream("POST", TEXT, json=body, timeout=timeout)
    with contextlib.suppress(httpx.TimeoutException), streaming as found:
        assert n_lines is not None
        list(zip(range(n_lines), found.iter_lines()))
    wait_until(lambda: no_request(served))
    assert_answers(served)


def test_a_request_ends_at_the_timeout_or_when_the_server_stops():
    endless = {"prompt": "The key of", "max_tokens": 100_000, "logit_bias": {"1": -100}}
    with serving(timeout=2) as served, concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert_refused(served.post(TEXT, endless), [408])
        wait_until(lambda: no_request(served))
        answer = pool.submit(served.post, TEXT, endless)
        wait_until(lambda: served.engine.batch.running)
        served.engine.stop()
        assert_refused(answer.result(5), [503])


def test_no_chunk_is_read_after_the_server_has_stopped(monkeypatch):
    evaluated = []

    def evaluate(arrays):
        evaluated.append(arrays)
        wait_until(lambda: not served.engine.is_alive)
        mx.eval(arrays)

    monkeypatch.setattr(loop_model, "mx", SimpleNamespace(eval=evaluate))
    monkeypatch.setattr(loop_model, "PROGRESS_INTERVAL", 0)
    with serving() as served, concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(served.post, TEXT, {"prompt": "The key of" * 50})
        wait_until(lambda: evaluated)
        served.engine.stop()
        assert_refused(answer.result(5), [503])
    assert len(evaluated) == 1


def test_a_failing_model_ends_its_requests_and_the_server_continues(caplog):
    def change(model, tokenizer):
        class Broken(type(model.model)):
            def __call__(self, inputs, *args, **kwargs):
                if (inputs == 9).any().item():
                    raise RuntimeError("a secret of the model's")
                return super().__call__(inputs, *args, **kwargs)

        model.model.__class__ = Broken

    with serving(load_named("demo", change)) as served:
        response = served.post(TEXT, {"prompt": [20, 21, 9, 22], "max_tokens": 4})
        assert response.status_code == 500
        error = response.json()["error"]
        request_id = response.headers["x-request-id"]
        assert "secret" not in error["message"] and error["message"].split()[-1] == request_id
        assert f"request {request_id} failed" in caplog.messages
        assert_answers(served)
        # A failure in a step of an answer fails all requests of that step, and no later request.
        body = {"prompt": [20, 21, 22], "max_tokens": 50, "logit_bias": {"9": 1000}}
        assert served.post(TEXT, body).status_code == 500
        streamed = served.post(TEXT, body | {"stream": True})
        assert f"under {streamed.headers['x-request-id']}" in streamed.text
        assert_answers(served)
        wait_until(lambda: no_request(served))


def test_requests_wait_rather_than_take_more_memory():
    limit = 6_000_000  # 2,000 tokens in full
    with serving(limits=Limits(kv_bytes=limit)) as served:
        response = served.post(TEXT, {"prompt": "The key of " * 1000, "max_tokens": 4})
        assert_refused(response, [400], "prompt is too long: its ")
        assert "max_kv_bytes" in response.text and "context_length_exceeded" in response.text
        held, step, engine = [], served.engine._run_round, served.engine

        def looked_at():
            step()
            held.append(engine.batch.generator.prompt_cache_nbytes + engine.loaded.prefixes.nbytes)

        engine._run_round = looked_at
        bodies = [{"prompt": f"{word} " * 400, "max_tokens": 20} for word in ("key", "door")]
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            found = list(pool.map(lambda body: served.post(TEXT, body), bodies * 3))
        assert all(response.status_code == 200 for response in found)
        assert 0 < max(held) <= limit
