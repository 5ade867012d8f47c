"""Calls to MLX's memory functions around a model. MLX and mlx-lm are wrapped, because only Metal acts on the calls."""

import contextlib

import mlx.core as mx
import pytest
from batch_helpers import Run, prompts_of
from mlx_lm.models import llama
from server_helpers import ask, serving, talk
from tiny_models import make_llama

from mlx_snapkv import Conversation
from mlx_snapkv.engine.prefill import mlx_generate
from mlx_snapkv.planning.machine import mac, this_machine

TEXT = ["--prompt", "The access code of the opal oak is 481516. What is it?"]
LITTLE = [*TEXT, "-m", "2"]
SNAPKV = ["--snapkv", "budget=16,n_sink=2,n_window=8,obs_window=8,lookahead=0"]
SMALL = ["--length", "150", "--continuation", "4", "--documents", "1"]


@pytest.fixture
def wired(monkeypatch):
    """Return a list that records, for each call of a LLaMA, whether mlx-lm's wired limit was set."""
    held, seen = [], []
    limit, call = mlx_generate.wired_limit, llama.Model.__call__

    @contextlib.contextmanager
    def observed(model, *args):
        held.append(model)
        with limit(model, *args):
            yield
        held.remove(model)

    def called(self, *args, **how):
        seen.append(any(model is self for model in held))
        return call(self, *args, **how)

    monkeypatch.setattr(mlx_generate, "wired_limit", observed)
    monkeypatch.setattr(llama.Model, "__call__", called)
    return seen


@pytest.mark.parametrize(
    "command",
    [
        ["generate", "--model", "demo", *LITTLE],
        ["compare", "--model", "demo", *LITTLE, "--policy", f"snapkv:{SNAPKV[1]}"],
        ["inspect", "--model", "demo", *LITTLE, *SNAPKV],
        ["chat", "--model", "demo", "-m", "2", *SNAPKV],
        ["cache-prompt", "--model", "demo", "--prompt-file", "-", "-o", "saved.safetensors"],
        ["batch", "-", "-o", "answers.jsonl", "--model", "demo", *SNAPKV],
        ["eval", "fidelity", "--model", "demo", "--text", "text.txt", *SMALL, "--policy", f"snapkv:{SNAPKV[1]}"],
        ["bench", *"--model demo --context 1024 -p 1024 -n 1 --steps 1 --policy snapkv:budget=99".split()],
    ],
    ids=lambda command: command[0],
)  # fmt: skip
def test_every_command_that_runs_a_model_wires_its_memory(
    call, wired, command, text_file, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    text_file(tmp_path / "text.txt", 380, 1)
    request = b'{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": '
    request += (
        b'{"model": "demo", "max_tokens": 2, "messages": [{"role": "user", "content": "Hello"}]}}\n'
    )
    code, _, err = call(*command, stdin=request)
    assert code == 0, err
    assert wired and all(wired)


def test_a_server_wires_its_memory(wired):
    with serving() as served:
        ask(served, talk("Hello"), max_tokens=2)
    assert wired and all(wired)


def test_freed_buffers_are_bounded_by_the_machines_memory(call, monkeypatch):
    told, tell = [], mx.set_cache_limit
    monkeypatch.setattr(mx, "set_cache_limit", lambda n: told.append(n) or tell(n))
    assert call("generate", "--model", "demo", *LITTLE)[0] == 0
    assert len(told) == 1 and told[0] <= max(1 << 28, this_machine().memory // 16)
    assert [mac(n << 30).buffer_limit >> 20 for n in (8, 16, 128)] == [341, 682, 6144]
    assert mac(1 << 30).buffer_limit == 1 << 28


@pytest.fixture
def happened(monkeypatch):
    """Return a list of events: "cleared" whenever MLX's buffers are cleared, and events that a test adds."""
    events, clear = [], mx.clear_cache
    monkeypatch.setattr(mx, "clear_cache", lambda: events.append("cleared") or clear())
    return events


def test_buffers_are_cleared_between_the_turns_of_a_chat(demo_llama, happened):
    conversation = Conversation(*demo_llama, max_tokens=3)
    for _ in conversation.send("Hello"):
        happened.append("token")
    assert happened[-2:] == ["token", "cleared"]


def test_buffers_are_cleared_when_a_request_leaves_a_batch(happened):
    run = Run(make_llama(), "snapkv:budget=32,n_sink=2,n_window=16,obs_window=16,lookahead=0")
    first, other, removed = run.insert(prompts_of(100, 100, 100), [5, 9, 20])
    while stepped := run.step():
        happened.append([r.uid for r in stepped[1] if r.finish_reason])
        if happened[-1] == [other]:
            run.generator.remove([removed])
    for leaves in ([first], [other]):
        assert happened[happened.index(leaves) - 1] == "cleared"
    assert happened[-2:] == [[other], "cleared"]
