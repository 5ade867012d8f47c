"""`mlx-snapkv serve` as a process: its first line, the clients, Ctrl-C."""

import signal
import socket
import sys

import anthropic
import fork_helpers
import openai
from server_helpers import served_process


def test_serve_answers_both_clients_until_interrupted():
    with served_process("--alias", "gpt-4o") as (url, process):
        messages = [{"role": "user", "content": "The key of"}]
        given = {"model": "m", "messages": messages, "max_tokens": 4}
        with anthropic.Anthropic(base_url=url, api_key="any") as client:
            text = client.messages.create(**given).content[0].text
        with openai.OpenAI(base_url=f"{url}/v1", api_key="any") as client:
            assert client.chat.completions.create(**given).choices[0].message.content == text
            assert [model.id for model in client.models.list()] == ["demo", "gpt-4o"]
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        assert "Traceback" not in process.stderr.read()


def test_a_port_in_use_is_told_before_a_model_is_looked_for():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        command = [sys.executable, "-m", "mlx_snapkv", "serve", "--model", "nowhere/at-all"]
        done = fork_helpers.run([*command, "--port", port], capture_output=True, text=True)
    said = f"mlx-snapkv: --host 127.0.0.1 --port {port}: Address already in use; give another one\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)
