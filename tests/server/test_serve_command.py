"""`mlx-snapkv serve` as a process: its first line, the clients, Ctrl-C."""

import signal
import socket
import subprocess
import sys

import anthropic
import openai

COMMAND = [sys.executable, "-m", "mlx_snapkv", "serve", "--model", "demo", "--port", "0"]


def default_interrupt():
    # It is ignored where tests run in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_serve_answers_both_clients_until_interrupted():
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(COMMAND, preexec_fn=default_interrupt, **options) as process:
        try:
            line = process.stdout.readline()
            assert line.startswith("demo at http://127.0.0.1:"), line + process.stderr.read()
            url = line.split()[2]
            assert f"base_url={url}/v1" in line and f"ANTHROPIC_BASE_URL={url} " in line
            messages = [{"role": "user", "content": "The key of"}]
            given = {"model": "m", "messages": messages, "max_tokens": 4}
            with anthropic.Anthropic(base_url=url, api_key="any") as client:
                text = client.messages.create(**given).content[0].text
            with openai.OpenAI(base_url=f"{url}/v1", api_key="any") as client:
                assert client.chat.completions.create(**given).choices[0].message.content == text
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0
            assert "Traceback" not in process.stderr.read()
        finally:
            process.kill()


def test_a_port_in_use_is_told_before_a_model_is_looked_for():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        command = [*COMMAND[:-1], port, "--model", "nowhere/at-all"]
        done = subprocess.run(command, capture_output=True, text=True)
    said = f"mlx-snapkv: --host 127.0.0.1 --port {port}: Address already in use; give another one\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)
