"""Helpers that run a server with a real model on a free port, in this process or another."""

import contextlib
import itertools
import sys
import threading
from dataclasses import dataclass
from queue import SimpleQueue
from subprocess import PIPE
from typing import Any

import fork_helpers
import httpx

from mlx_snapkv.cli.loading import load_model
from mlx_snapkv.completions.body import Defaults
from mlx_snapkv.planning.settings import resolve_setting
from mlx_snapkv.server.access import Settings
from mlx_snapkv.server.admission import Limits
from mlx_snapkv.server.app import bind_socket, serve
from mlx_snapkv.server.engine import Engine
from mlx_snapkv.server.prefix_cache import PrefixCache
from mlx_snapkv.server.requests import Loaded

POLICY = "snapkv:budget=25%,n_sink=4,n_window=32,min_ctx=256,obs_window=32,lookahead=4"


@dataclass
class Served:
    url: str
    engine: Engine
    client: Any

    def post(self, path, json=None, **options):
        return self.client.post(path, json=json, **options)

    def metric(self, name):
        """Return a metric's value from /metrics."""
        lines = self.client.get("/metrics").text.splitlines()
        return float(next(line for line in lines if line.startswith(name)).split()[-1])


def load_named(name, change=lambda model, tokenizer: None):
    def load():
        model, tokenizer = load_model(name)
        change(model, tokenizer)
        return Loaded(model, tokenizer, (name,), PrefixCache(1 << 32))

    return load


@contextlib.contextmanager
def serving(load=None, *, policy=POLICY, limits=None, generation=(), **settings):
    """Yield a running server. `generation` contains more options for its batches."""
    settings = Settings(port=0, **settings)
    options = {"policy": resolve_setting(policy=policy), **dict(generation)}
    place = bind_socket(settings)
    engine = Engine(
        load or load_named("demo"),
        options,
        limits or Limits(),
        Defaults(max_tokens=200),
    )
    started: SimpleQueue = SimpleQueue()
    thread = threading.Thread(target=serve, args=(engine, settings, place, started.put))
    thread.start()
    server = started.get(timeout=30)
    url = f"http://127.0.0.1:{place.getsockname()[1]}"
    try:
        with httpx.Client(base_url=url, timeout=60) as client:
            yield Served(url, engine, client)
    finally:
        server.should_exit = True
        thread.join(30)
    assert not thread.is_alive()


def connected(client, served, path=""):
    """Return OpenAI's or Anthropic's client, connected to this server."""
    return client(base_url=served.url + path, api_key="any", timeout=60, max_retries=0)


def talk(*said):
    """Return messages that alternate between user and assistant."""
    roles = itertools.cycle(("user", "assistant"))
    return [{"role": role, "content": text} for role, text in zip(roles, said)]


def ask(client, messages, **fields):
    """Return the answer's text, the number of cached prompt tokens, and the whole response."""
    body = {"messages": messages, "max_tokens": 20} | fields
    found = client.post("/v1/chat/completions", json=body).json()
    cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found["choices"][0]["message"]["content"], cached, found


@contextlib.contextmanager
def served_process(*flags):
    """Run `mlx-snapkv serve` as a process on a free port. Yield its url and the process."""
    command = [
        *(sys.executable, "-m", "mlx_snapkv", "serve", "--model", "demo", "--port", "0"),
        *flags,
    ]
    process = fork_helpers.Popen(command, stdout=PIPE, stderr=PIPE, text=True)
    try:
        line = process.stdout.readline()
        assert " at http://" in line, line + process.stderr.read()
        url = line.split(" at ")[1].split()[0]
        assert f"base_url={url}/v1" in line and f"ANTHROPIC_BASE_URL={url} " in line
        yield url, process
    finally:
        process.kill()
        process.communicate()
