"""`mlx-snapkv serve` as a process: its first lines, its models, Ctrl-C."""

import re
import signal
import socket
import sys

import fork_helpers
import httpx
from server_helpers import served_process


def test_an_alias_is_a_model_and_ctrl_c_ends_the_server():
    with served_process("--alias", "gpt-4o") as (url, process):
        room = process.stdout.readline()
        assert re.fullmatch(r"prefix cache: [\d.]+ .B hold [\d,]+ prompts of 16,384 tokens\n", room)
        models = httpx.get(f"{url}/v1/models").json()["data"]
        assert [model["id"] for model in models] == ["demo", "gpt-4o"]
        listed = httpx.get(f"{url}/v1/models")
        refused = httpx.post(f"{url}/v1/messages", json={})
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        log = process.stderr.read()
        assert "Traceback" not in log
        assert re.search(rf"GET /v1/models 200 \S+ s {listed.headers['x-request-id']}\n", log)
        assert re.search(rf"POST /v1/messages 400 \S+ s {refused.headers['request-id']}\n", log)


def test_a_port_in_use_is_reported_before_the_model_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        command = [sys.executable, "-m", "mlx_snapkv", "serve", "--model", "nowhere/at-all"]
        done = fork_helpers.run([*command, "--port", port], capture_output=True, text=True)
    said = f"mlx-snapkv: --host 127.0.0.1 --port {port}: Address already in use; give another one\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)
