"""Clients of all kinds for `soak_server.py`: good ones, bad ones, ones that leave, and ones that hardly read."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
from bad_requests import BAD, CHAT, RAW, TEXT

from mlx_snapkv.demo.documents import filler_sentence

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
ENDS = ("data: [DONE]", "event: message_stop")
ENDS += ("event: response.completed", "event: response.incomplete")
SENTENCES = 120  # of a document at most, about 2,500 tokens
SAME = {"prompt": "The key of", "max_tokens": 40}


@dataclass
class Tally:
    """What all clients have seen: requests by what became of them, what was wrong, the slowest refusal in seconds."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    slowest: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, what: str, problem: str | None = None) -> None:
        with self.lock:
            self.counts[what] += 1
            if problem is not None:
                self.wrong.append(f"{what}: {problem}"[:400])


class Clients:
    """One client of every kind is a method, which does one thing and may be called again and again."""

    def __init__(self, url: str, seed: int, tally: Tally):
        self._rng, self._tally = random.Random(seed), tally
        self._url = url
        self._client = httpx.Client(base_url=url, timeout=300)
        self._said: list[dict[str, str]] = []
        self._same: str | None = None

    def good(self) -> None:
        """A request of one of the APIs, about a document of a random length or as a follow-up."""
        path, body = self._request()
        problem = self._streamed(path, body) if body["stream"] else self._whole(path, body)
        self._tally.note("good requests", problem)

    def same(self) -> None:
        """The same greedy request: others' must not show in its answer."""
        choice = self._client.post(TEXT, json=SAME).json()["choices"][0]
        self._same = self._same or choice["text"]
        problem = None if choice["text"] == self._same else f"it answers {choice['text']!r} now"
        self._tally.note("equal requests", problem)

    def bad(self) -> None:
        """One that must be refused."""
        kind = self._rng.choice((self._bad_fields, self._bad_bytes))
        began = time.monotonic()
        status, body = kind()
        self._tally.slowest = max(self._tally.slowest, time.monotonic() - began)
        try:
            refused = 400 <= status < 500 and json.loads(body)["error"]["message"]
        except (ValueError, KeyError, TypeError):  # it is not the API's form
            refused = False
        problem = None if refused else f"{kind.__name__}: {status} {body[:200]!r}"
        self._tally.note("bad requests", problem)

    def leaving(self) -> None:
        """One that goes away: before it is answered, or in the middle of that."""
        path, body = self._request()
        body |= {"stream": self._rng.random() < 0.8}
        try:
            if not body["stream"]:
                self._client.post(path, json=body, timeout=self._rng.uniform(0.01, 2))
                return
            with self._client.stream("POST", path, json=body) as response:
                for n, _ in enumerate(response.iter_lines()):
                    if n > self._rng.randrange(60):
                        break
        except httpx.TimeoutException:
            pass
        self._tally.note("clients that left")

    def slow(self) -> None:
        """One that hardly reads what it gets, and goes away or reads on."""
        body = {**SAME, "max_tokens": 2000, "stream": True, "logit_bias": {"1": -100}}
        host, port = self._url.removeprefix("http://").split(":")
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            connection.settimeout(120)
            connection.connect((host, int(port)))
            content = json.dumps(body).encode()
            head = f"POST {TEXT} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
            connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
            for _ in range(self._rng.randrange(3, 15)):
                connection.recv(64)
                time.sleep(0.5)
            if self._rng.random() < 0.5:
                self._tally.note("clients that left")
                return
            found = b""
            while part := connection.recv(65536):
                found = (found + part)[-200:]
        self._tally.note("slow readers", None if b"data: [DONE]" in found else f"{found!r}")

    def _request(self) -> tuple[str, dict[str, Any]]:
        rng = self._rng
        text = " ".join(filler_sentence(rng) for _ in range(rng.randint(1, SENTENCES)))
        if self._said and len(self._said) < 20 and rng.random() < 0.5:
            text = "What is the access code of the opal oak?"
        else:
            self._said = []
        self._said.append({"role": "user", "content": text})
        n = rng.randint(1, 120)
        path, fields = rng.choice(
            [
                (CHAT, {"messages": list(self._said), "max_tokens": n}),
                (TEXT, {"prompt": text, "max_tokens": n}),
                (MESSAGES, {"model": "m", "messages": list(self._said), "max_tokens": n}),
                (RESPONSES, {"model": "m", "input": text, "max_output_tokens": n}),
            ]
        )
        self._said.append({"role": "assistant", "content": "It is 481516."})
        return path, {**fields, "stream": rng.random() < 0.6}

    def _whole(self, path: str, body: dict[str, Any]) -> str | None:
        response = self._client.post(path, json=body)
        ok = response.status_code == 200 and response.json().get("error") is None
        return None if ok else f"{path}: {response.status_code} {response.text[:200]}"

    def _streamed(self, path: str, body: dict[str, Any]) -> str | None:
        ended, seen = False, []
        with self._client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                return f"{path}: {response.status_code} {response.read().decode()[:200]}"
            for line in response.iter_lines():
                seen = [*seen[-3:], line]
                ended = ended or line in ENDS
                if line.startswith(("event: error", 'data: {"error"')):
                    return f"{path}: {seen}"
        return None if ended else f"{path}: its stream ended with {seen}"

    def _bad_fields(self) -> tuple[int, str]:
        path, body = self._rng.choice(list(BAD.values()))
        return self._posted(path, json.dumps(body).encode())

    def _bad_bytes(self) -> tuple[int, str]:
        path = self._rng.choice((CHAT, TEXT, MESSAGES, RESPONSES))
        return self._posted(path, self._rng.choice(list(RAW.values())))

    def _posted(self, path: str, content: bytes) -> tuple[int, str]:
        response = self._client.post(path, content=content)
        return response.status_code, response.text


KINDS = [*[Clients.good] * 4, Clients.same, Clients.bad, *[Clients.leaving] * 2, Clients.slow]


def run_all(url: str, seed: int, seconds: float, tally: Tally) -> list[threading.Thread]:
    """Start one thread of each of `KINDS`, which go on for so long."""
    until = time.monotonic() + seconds

    def go_on(kind: Callable[[Clients], None], number: int) -> None:
        clients = Clients(url, seed + number, tally)
        while time.monotonic() < until:
            try:
                kind(clients)
            except Exception as error:
                tally.note(kind.__name__, f"{type(error).__name__}: {error}")
                time.sleep(0.2)

    threads = [threading.Thread(target=go_on, args=(kind, n)) for n, kind in enumerate(KINDS)]
    for thread in threads:
        thread.start()
    return threads
