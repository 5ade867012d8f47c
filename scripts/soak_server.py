"""A server under good, bad and leaving clients, for minutes: nothing may grow, die or go unanswered.

python scripts/soak_server.py --minutes 10         # exit code 1 if something does
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import statistics
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

sys.path += [str(Path(__file__).parent.parent / folder) for folder in ("tests", "scripts")]

from bad_requests import BAD, CHAT, RAW, TEXT
from measure_servers import running
from results_page import look, options

from mlx_snapkv.demo.documents import filler_sentence

FLAGS = "--snapkv budget=25%,n_sink=4,n_window=32,min_ctx=256 --memory recall --queue 64".split()
FLAGS += "--prefix-bytes 60MB --max-kv-bytes 80MB".split()
RESPONSES = "/v1/responses"
PATHS = (CHAT, TEXT, "/v1/messages", RESPONSES)
ENDS = {"data: [DONE]", "event: message_stop"}
ENDS |= {"event: response.completed", "event: response.incomplete"}
KINDS = ("good",) * 4 + ("bad",) + ("leaving",) * 3  # a client each
SENTENCES = 120  # of a document at most, about 2,500 tokens
EVERY = 2.0  # seconds between two looks
WARM = 1 / 3  # of the time, until which memory may grow: caches fill
MAY_GROW = {"memory": lambda before: 1.10 * before, "files": lambda before: before + 5}


def requested(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A request of one of the APIs about a document, a follow-up of it at times; few seeds, so that prefixes repeat."""
    document = random.Random(rng.randrange(20))
    text = " ".join(filler_sentence(document) for _ in range(document.randint(1, SENTENCES)))
    said = [{"role": "user", "content": text}]
    if rng.random() < 0.5:
        said += [{"role": "assistant", "content": "It is 481516."}]
        said += [{"role": "user", "content": "What is the access code of the opal oak?"}]
    path, n = rng.choice(PATHS), rng.randint(1, 120)
    asked: dict[str, Any] = {"model": "m", "stream": rng.random() < 0.6}
    if path == RESPONSES:
        return path, asked | {"input": text, "max_output_tokens": n}
    return path, asked | {"max_tokens": n} | (
        {"prompt": text} if path == TEXT else {"messages": said}
    )


def ask(client: httpx.Client, kind: str, rng: random.Random) -> str | None:
    """Ask once, as such a client does; what was wrong with the answer, if anything was."""
    path, body = requested(rng)
    content = json.dumps(body).encode()
    if kind == "leaving":
        with (
            contextlib.suppress(httpx.TimeoutException),
            client.stream("POST", path, content=content, timeout=rng.uniform(0.01, 10)) as response,
        ):
            for _ in zip(range(rng.randrange(60)), response.iter_lines()):
                time.sleep(rng.choice((0, 0.2)))  # it hardly reads
        return None
    if kind == "bad":
        path, body, _ = rng.choice(BAD)
        content = json.dumps(body).encode()
        if rng.random() < 0.5:
            path, content = rng.choice(PATHS), rng.choice(list(RAW.values()))
    response = client.post(path, content=content)
    text, status = response.text, response.status_code
    try:
        if kind == "bad":
            is_right = 400 <= status < 500 and bool(response.json()["error"]["message"])
        elif body["stream"]:
            failed = "\nevent: error" in text or '\ndata: {"error"' in text
            is_right = status == 200 and not failed and bool(ENDS & set(text.splitlines()))
        else:
            is_right = status == 200 and response.json().get("error") is None
    except (ValueError, KeyError, TypeError):  # it is not the API's form
        is_right = False
    return None if is_right else f"{kind}: {path}: {status} {text[-300:]!r}"


def grown(looks: list[dict[str, int]]) -> list[str]:
    """What has grown after the warm-up, from the first half of the rest to the last quarter of it."""
    rest = looks[int(len(looks) * WARM) :]
    parts = rest[: len(rest) // 2], rest[-(len(rest) // 4) :]
    found = []
    for what in MAY_GROW.keys() & rest[0].keys():
        before, after = (statistics.median(each[what] for each in part) for part in parts)
        if after > MAY_GROW[what](before):
            found.append(f"{what}: from {before:,.0f} to {after:,.0f}")
    return found


def soak(url: str, pid: int, minutes: float, seed: int) -> list[str]:
    """What was wrong."""
    counts, wrong, looks = Counter[str](), [], []
    until = time.monotonic() + 60 * minutes

    def go_on(kind: str, number: int) -> None:
        rng = random.Random(seed + number)
        with httpx.Client(base_url=url, timeout=300) as client:
            while time.monotonic() < until:
                try:
                    wrong.extend(filter(None, [ask(client, kind, rng)]))
                except httpx.HTTPError as error:
                    wrong.append(f"{kind}: {error!r}")
                    time.sleep(0.2)
                counts[kind] += 1

    threads = [threading.Thread(target=go_on, args=(kind, n)) for n, kind in enumerate(KINDS)]
    for thread in threads:
        thread.start()
    while time.monotonic() < until:
        looks.append(look(pid))
        time.sleep(EVERY)
    for thread in threads:
        thread.join(300)
    time.sleep(EVERY)
    print(counts, looks[-1])
    found = [f"{len(wrong)} wrong, such as:", *wrong[:10]] if wrong else []
    if any(thread.is_alive() for thread in threads):
        found.append("a client was never answered")
    if "mlx_snapkv_open_requests 0" not in httpx.get(f"{url}/metrics", timeout=60).text:
        found.append("requests are open still")
    if httpx.get(f"{url}/health", timeout=60).status_code != 200:
        found.append("the thread that generates has died")
    return found + grown(looks)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=FLAGS, help="of the server")
    args = parser.parse_args()
    with running(["mlx_snapkv", "serve", "--model", "demo", *args.flags]) as (url, process, log):
        wrong = soak(url, process.pid, args.minutes, args.seed)
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
