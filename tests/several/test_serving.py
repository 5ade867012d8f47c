"""A server that two processes are: their clients, and how they end."""

import contextlib
import re
import signal
import threading
import time

import httpx
import pytest
from batch_file_helpers import COLD, FACT
from server_helpers import POLICY, serving
from several_helpers import running

QUESTION = "What is the access code of the amber falcon?"
STARTING, ENDING = 60, 20  # seconds that they get


@contextlib.contextmanager
def served(folder, *options):
    """A client of two processes, and those."""
    command = ["serve", "--model", "demo", "--port", "0", "--policy", POLICY, "--memory", "recall"]
    with running(folder, "several_server", *command, *options) as ranks:
        until = time.monotonic() + STARTING
        while not (found := re.search(r" at (http://\S+)", ranks[0].said)):
            assert time.monotonic() < until and ranks[0].process.poll() is None, ranks[0].said
            time.sleep(0.1)
        with httpx.Client(base_url=found[1], timeout=STARTING) as client:
            yield client, ranks


def ended(ranks):
    """The exit codes, if all end in time."""
    return [rank.process.wait(ENDING) for rank in ranks]


def ask(client, messages, **body):
    body = {"messages": messages, "max_tokens": 20} | body
    return client.post("/v1/chat/completions", json=body)


def said(response):
    found = response.json()
    return found["choices"], found["usage"], found["mlx_snapkv"]


def talk(n, *more):
    return [{"role": "user", "content": FACT + COLD * n + QUESTION}, *more]


def at_once(*calls):
    """What calls in threads of their own give."""
    found = [None] * len(calls)

    def work(i):
        found[i] = calls[i]()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(STARTING)
    return found


def conversation(client):
    """Two clients at once, a follow-up, and a sampled answer with a stop text."""
    first, other = at_once(lambda: ask(client, talk(60)), lambda: ask(client, talk(90)))
    answer = first.json()["choices"][0]["message"]
    more = [answer, {"role": "user", "content": QUESTION}]
    follow_up = ask(client, talk(60, *more))
    assert follow_up.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 400
    sampled = ask(client, talk(3), temperature=2.0, top_p=0.9, seed=5, stop="9")
    entries = said(follow_up)[2]["entries"]
    return [said(response)[0] for response in (first, other, follow_up, sampled)], entries


@pytest.fixture(scope="module")
def wanted():
    """What one process answers."""
    with serving() as one:
        return conversation(one.client)


def goes_away(client):
    with client.stream(
        "POST",
        "/v1/chat/completions",
        json={"messages": talk(1), "stream": True, "max_tokens": 3000, "temperature": 5.0},
    ) as response:
        for _, _ in zip(range(5), response.iter_lines()):
            pass


def n_open(client):
    found = re.search(r"^mlx_snapkv_open_requests (\S+)", client.get("/metrics").text, re.M)
    return float(found[1])


def test_two_serve_as_one_does_until_they_are_told_to_stop(wanted, tmp_path):
    with served(tmp_path) as (client, ranks):
        assert conversation(client) == wanted
        refused = ask(client, [])
        assert refused.status_code == 400
        goes_away(client)
        until = time.monotonic() + ENDING
        while n_open(client) and time.monotonic() < until:
            time.sleep(0.1)
        assert n_open(client) == 0
        ranks[0].process.send_signal(signal.SIGTERM)
        assert ended(ranks) == [-signal.SIGTERM, 0]
        assert "Traceback" not in ranks[1].said


def test_told_to_stop_in_a_step_both_end_after_it(tmp_path):
    with served(tmp_path) as (client, ranks):
        body = {"messages": talk(1), "stream": True, "max_tokens": 79}
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            next(response.iter_lines())
            ranks[0].process.send_signal(signal.SIGTERM)
            assert ended(ranks) == [-signal.SIGTERM, 0]


def test_both_keep_the_same_prompts(tmp_path):
    """One that is too large for rank 0 drives out none of the other's."""
    large = [{"role": "user", "content": "Bees. " + COLD * 150 + QUESTION}]
    with served(tmp_path, "--prefix-bytes", "1MB") as (client, ranks):
        for messages, least in [(talk(30), 0), (large, 0), (talk(30), 200)]:
            usage = ask(client, messages).json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] >= least
        assert "are not kept for later prompts" in ranks[0].said


def test_a_step_that_fails_on_one_ends_both(tmp_path):
    with served(tmp_path) as (client, ranks):
        with contextlib.suppress(httpx.HTTPError):  # or it is told so
            assert ask(client, talk(5), max_tokens=78).status_code == 500
        assert 0 not in ended(ranks)
        assert "rank 1: MemoryError: no room to step" in ranks[0].said
        assert "no room to step" in ranks[1].said
