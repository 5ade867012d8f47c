"""A server under good, bad, slow and leaving clients, for minutes: nothing may grow, die or go unanswered.

python scripts/soak_server.py --minutes 10         # exit code 1 if something does
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parent.parent
sys.path += [str(ROOT / "tests"), str(ROOT / "scripts")]

from bad_requests import BAD, CHAT, RAW, TEXT  # noqa: E402
from measure_servers import running  # noqa: E402
from results_page import look, options  # noqa: E402

from mlx_snapkv.demo.documents import filler_sentence  # noqa: E402

FLAGS = "--snapkv budget=25%,n_sink=4,n_window=32,min_ctx=256 --memory recall --queue 64".split()
FLAGS += "--prefix-bytes 60MB --max-kv-bytes 80MB".split()
RESPONSES = "/v1/responses"
PATHS = (CHAT, TEXT, "/v1/messages", RESPONSES)
ENDS = ("data: [DONE]", "event: message_stop")
ENDS += ("event: response.completed", "event: response.incomplete")
SENTENCES = 120  # of a document at most, about 2,500 tokens
SAME = {"prompt": "The key of", "max_tokens": 40}
EVERY = 2.0  # seconds between two looks
WARM = 1 / 3  # of the time, until which memory may grow: caches fill
MAY_GROW = {"memory": lambda before: 1.10 * before, "files": lambda before: before + 5}
LINES = 400  # of /metrics, whose names must not come from clients
SETTLE = 30.0  # seconds until no request is open


class Clients:
    """One client of every kind is a method, which does one thing and may be called again and again.

    Attributes:
        counts, wrong: of all clients: requests by what became of them, and what was not as it should be.
    """

    def __init__(self, url: str, seed: int, counts: Counter[str], wrong: list[str]):
        self.counts, self.wrong = counts, wrong
        self._rng, self._client = random.Random(seed), httpx.Client(base_url=url, timeout=300)
        self._said: list[dict[str, str]] = []
        self._same: str | None = None

    def note(self, what: str, is_right: bool = True, problem: str = "") -> None:
        self.counts[what] += 1
        if not is_right:
            self.wrong.append(f"{what}: {problem}"[:400])

    def good(self) -> None:
        """A request of one of the APIs, about a document of a random length or as a follow-up."""
        path, body = self._request()
        with self._client.stream("POST", path, json=body) as response:
            text = response.read().decode()
        is_right = response.status_code == 200
        if body["stream"]:
            lines = text.splitlines()
            is_right &= not any(
                line.startswith(("event: error", 'data: {"error"')) for line in lines
            )
            is_right &= bool(set(ENDS) & set(lines))
        elif is_right:
            is_right = response.json().get("error") is None
        self.note("good requests", is_right, f"{path}: {response.status_code} {text[-300:]}")

    def same(self) -> None:
        """The same greedy request: others' must not show in its answer."""
        text = self._client.post(TEXT, json=SAME).json()["choices"][0]["text"]
        self._same = self._same or text
        self.note("equal requests", text == self._same, f"it answers {text!r} now")

    def bad(self) -> None:
        """One that must be refused."""
        path, body = self._rng.choice(list(BAD.values()))
        content = json.dumps(body).encode()
        if self._rng.random() < 0.5:
            path, content = self._rng.choice(PATHS), self._rng.choice(list(RAW.values()))
        response = self._client.post(path, content=content)
        try:
            refused = 400 <= response.status_code < 500 and response.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):  # it is not the API's form
            refused = False
        problem = f"{path}: {response.status_code} {response.text[:200]!r}"
        self.note("bad requests", bool(refused), problem)

    def leaving(self) -> None:
        """One that hardly reads what it gets, and goes away: before it is answered, or in the middle of that."""
        path, body = self._request()
        with contextlib.suppress(httpx.TimeoutException):
            if not body["stream"]:
                self._client.post(path, json=body, timeout=self._rng.uniform(0.01, 2))
            else:
                with self._client.stream("POST", path, json=body) as response:
                    for _ in zip(range(self._rng.randrange(60)), response.iter_lines()):
                        time.sleep(self._rng.choice((0, 0.2)))
        self.note("clients that left")

    def _request(self) -> tuple[str, dict[str, Any]]:
        rng = self._rng
        text = " ".join(filler_sentence(rng) for _ in range(rng.randint(1, SENTENCES)))
        if self._said and len(self._said) < 20 and rng.random() < 0.5:
            text = "What is the access code of the opal oak?"
        else:
            self._said = []
        self._said.append({"role": "user", "content": text})
        n, said, path = rng.randint(1, 120), list(self._said), rng.choice(PATHS)
        self._said.append({"role": "assistant", "content": "It is 481516."})
        asked: dict[str, Any] = {"model": "m", "stream": rng.random() < 0.6}
        if path == RESPONSES:
            return path, asked | {"input": text, "max_output_tokens": n}
        given = {"prompt": text} if path == TEXT else {"messages": said}
        return path, asked | given | {"max_tokens": n}


KINDS = [*[Clients.good] * 4, Clients.same, Clients.bad, *[Clients.leaving] * 3]


def grown(looks: list[dict[str, int]]) -> list[str]:
    """What has grown after the warm-up, from the first half of the rest to the last quarter of it."""
    rest = looks[int(len(looks) * WARM) :]
    parts = rest[: len(rest) // 2], rest[-(len(rest) // 4) :]
    found = []
    for what, may_grow in MAY_GROW.items():
        if what in rest[0]:
            before, after = (statistics.median(each[what] for each in part) for part in parts)
            print(f"{what}: {before:,.0f} after the warm-up, {after:,.0f} at the end")
            if after > may_grow(before):
                found.append(f"{what}: from {before:,.0f} to {after:,.0f}")
    return found


def unsettled(url: str) -> list[str]:
    """What is still open, or told too long, when all clients have gone."""

    def metrics() -> str:
        return httpx.get(f"{url}/metrics", timeout=60).text

    until, still_open = time.monotonic() + SETTLE, r"^mlx_snapkv_open_requests\b.* [^0]"
    while re.search(still_open, metrics(), re.M) and time.monotonic() < until:
        time.sleep(0.5)
    found = ["requests are open still"] if re.search(still_open, metrics(), re.M) else []
    lines = len(metrics().splitlines())
    found += [f"/metrics has {lines} lines"] if lines > LINES else []
    if httpx.get(f"{url}/health", timeout=60).status_code != 200:
        found.append("the thread that generates has died")
    return found


def soak(url: str, process: subprocess.Popen, minutes: float, seed: int) -> list[str]:
    """What was wrong."""
    counts, wrong, looks = Counter[str](), [], []
    until = time.monotonic() + 60 * minutes

    def go_on(kind: Callable[[Clients], None], number: int) -> None:
        clients = Clients(url, seed + number, counts, wrong)
        while time.monotonic() < until:
            try:
                kind(clients)
            except Exception as error:
                clients.note(kind.__name__, False, f"{type(error).__name__}: {error}")
                time.sleep(0.2)

    threads = [threading.Thread(target=go_on, args=(kind, n)) for n, kind in enumerate(KINDS)]
    for thread in threads:
        thread.start()
    while time.monotonic() < until and process.poll() is None:
        looks.append(look(process.pid))
        time.sleep(EVERY)
    for thread in threads:
        thread.join(300)
    if process.poll() is not None:
        return ["the server has ended", *wrong[:5]]
    print(", ".join(f"{n} {what}" for what, n in sorted(counts.items())))
    found = [f"{len(wrong)} wrong, such as:", *wrong[:10]] if wrong else []
    stuck = sum(thread.is_alive() for thread in threads)
    found += [f"{stuck} clients were never answered"] if stuck else []
    return found + unsettled(url) + grown(looks)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=FLAGS, help="of the server")
    args = parser.parse_args()
    with running(["mlx_snapkv", "serve", "--model", "demo", *args.flags]) as (url, process, log):
        wrong = soak(url, process, args.minutes, args.seed)
        process.terminate()
        ended = process.wait(30)
        log.seek(0)
        said = log.read()
    if "Traceback" in said or "failed" in said or ended not in (0, -signal.SIGTERM):
        wrong.append(f"the log has:\n{said[-3000:]}")
    print("\n".join(wrong) if wrong else "nothing was wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
