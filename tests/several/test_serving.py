"""A server that runs as two processes: its answers, and how it ends."""

import contextlib
import json
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
from batch_file_helpers import COLD, FACT
from server_helpers import POLICY, ask, serving, talk
from several_helpers import running

QUESTION = "What is the access code of the amber falcon?"
STARTING, ENDING = 60, 20  # time limits in seconds


@contextlib.contextmanager
def served(folder, *options):
    """Yield a client of a server of two processes, and its ranks."""
    command = ["serve", "--model", "demo", "--port", "0", "--policy", POLICY]
    with running(folder, "several_server", *command, *options) as ranks:
        until = time.monotonic() + STARTING
        while not (found := re.search(r" at (http://\S+)", ranks[0].said)):
            assert time.monotonic() < until and ranks[0].process.poll() is None, ranks[0].said
            time.sleep(0.1)
        with httpx.Client(base_url=found[1], timeout=STARTING) as client:
            yield client, ranks


def ended(ranks):
    return [rank.process.wait(ENDING) for rank in ranks]


def about(n):
    return FACT + COLD * n + QUESTION


def conversation(client):
    """Ask as two clients at once, then send a follow-up, a sampled request with a stop string, and a constrained one.

    Return the choices of all answers, and the entries kept for the follow-up.
    """
    with ThreadPoolExecutor(2) as pool:
        first, other = pool.map(lambda n: ask(client, talk(about(n))), (60, 90))
    follow_up = ask(client, talk(about(60), first[0], QUESTION))
    assert follow_up[1] > 400
    sampled = ask(client, talk(about(3)), temperature=2.0, top_p=0.9, seed=5, stop="9")
    wanted = {"response_format": {"type": "json_object"}, "temperature": 1.0, "seed": 3}
    constrained = ask(client, talk(about(3)), **wanted)
    assert isinstance(json.loads(constrained[0]), dict)
    every = first, other, follow_up, sampled, constrained
    found = [response["choices"] for *_, response in every]
    return found, follow_up[2]["mlx_snapkv"]["entries"]


def streaming(client, **fields):
    body = {"messages": talk(about(1)), "stream": True, **fields}
    return client.stream("POST", "/v1/chat/completions", json=body)


def test_two_processes_serve_as_one_until_sigterm(tmp_path):
    with served(tmp_path) as (client, ranks), serving() as one:
        assert conversation(client) == conversation(one.client)
        assert client.post("/v1/chat/completions", json={"messages": []}).status_code == 400
        with streaming(client, max_tokens=3000, temperature=5.0) as response:  # the client leaves
            list(zip(range(5), response.iter_lines()))
        assert ask(client, talk(about(60)))[1] > 400
        with streaming(client, max_tokens=79) as response:  # SIGTERM comes during a slow step
            next(response.iter_lines())
            ranks[0].process.send_signal(signal.SIGTERM)
            assert ended(ranks) == [-signal.SIGTERM, 0]
        assert "Traceback" not in ranks[1].said


def test_both_keep_the_same_prompts(tmp_path):
    """A prompt that is too large evicts no other prompt."""
    with served(tmp_path, "--prefix-bytes", "1MB") as (client, ranks):
        for text, least in [(about(30), 0), ("Bees. " + COLD * 150, 0), (about(30), 200)]:
            assert ask(client, talk(text))[1] >= least
        assert "are not kept for later prompts" in ranks[0].said
        ranks[0].process.send_signal(signal.SIGTERM)
        assert ended(ranks) == [-signal.SIGTERM, 0]


def test_a_step_that_fails_on_one_rank_ends_both(tmp_path):
    with served(tmp_path) as (client, ranks):
        with contextlib.suppress(httpx.HTTPError, KeyError):  # no answer, or an error
            assert not ask(client, talk(about(5)), max_tokens=78)
        assert ended(ranks[1:]) == [1] and "no room to step" in ranks[1].said
        assert ended(ranks[:1]) == [1]
