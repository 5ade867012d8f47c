"""Compare mlx-lm's server with ours, with several concurrent clients.

    python scripts/measure_servers.py                    # writes docs/servers.json; then: make docs

Each client asks a question about its own document, then three more, and sends the whole conversation each time.
"""

import contextlib
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import httpx
import mlx.core as mx
import openai
from results_page import Result, shared_options, watched

from mlx_snapkv.cli.loading import load_model
from mlx_snapkv.demo import MODELS
from mlx_snapkv.demo.questions import make_haystack

FOLLOW_UPS = 3  # questions after the first
ANSWER = 64  # tokens per answer; end-of-answer tokens are forbidden
NEVER = -100.0  # OpenAI's smallest logit_bias
WAIT = 600  # seconds within which a server must start
SERVERS = {
    "mlx_lm.server": ("mlx_lm", "server"),
    "ours, sparse": ("mlx_snapkv", "serve", "--sparse", "budget=6.25%"),
    "ours, SnapKV": ("mlx_snapkv", "serve", "--snapkv", "budget=6.25%"),
}


@dataclass
class Answer:
    """A streamed answer.

    Attributes:
        sent: time of the request.
        pieces: arrival time of each piece of the answer.
        usage: token counts reported by the server.
    """

    sent: float
    text: str = ""
    pieces: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)


class Client:
    """A client that asks for a document's facts, one after the other."""

    def __init__(self, tokenizer: Any, seed: int, n_tokens: int):
        """Generate a document of `n_tokens` tokens, and questions about it."""
        document, self._facts = make_haystack(
            tokenizer, random.Random(seed), 1 + FOLLOW_UPS, n_tokens
        )
        self._begin = f"{document}\n\n"
        self._no_end = {str(token): NEVER for token in tokenizer.eos_token_ids}
        self._messages: list[Any] = []
        self.n_right = 0

    def ask(self, url: str) -> Answer:
        """Ask the next question and return the answer."""
        fact = self._facts[len(self._messages) // 2]
        self._messages.append({"role": "user", "content": f"{self._begin}{fact.question}"})
        answer = ask(url, self._messages, self._no_end)
        self._messages.append({"role": "assistant", "content": answer.text})
        self.n_right += fact.value in answer.text
        self._begin = ""
        return answer


def ask(url: str, messages: list[Any], logit_bias: dict[str, float]) -> Answer:
    """Send a conversation to a server and return the streamed answer."""
    answer = Answer(time.perf_counter())
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", timeout=None) as client:
        for event in client.chat.completions.create(
            model="default_model",
            messages=messages,
            max_tokens=ANSWER,
            temperature=0.0,
            logit_bias=logit_bias,  # type: ignore[arg-type]
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"chat_template_kwargs": {"enable_thinking": False}},
        ):
            answer.usage = event.usage.to_dict() if event.usage else answer.usage
            if text := "".join(choice.delta.content or "" for choice in event.choices):
                answer.text += text
                answer.pieces.append(time.perf_counter())
    return answer


def write_float32(name: str, folder: Path) -> None:
    """Write an embedded model in float32 for all servers. On a CPU, ours would convert it anyway."""
    shutil.copytree(MODELS[name], folder)
    file = str(folder / "model.safetensors")
    weights: Any = mx.load(file)
    wide = {key: weight.astype(mx.float32) for key, weight in weights.items()}
    mx.eval(wide)
    mx.save_safetensors(file, wide, {"format": "mlx"})


@contextlib.contextmanager
def running(command: list[str], log: IO[str] | None = None) -> Iterator[tuple[str, int]]:
    """Run a server during the block. Yield its URL and process id, and write its output to `log`."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    place, url = ["--host", "127.0.0.1", "--port", str(port)], f"http://127.0.0.1:{port}"
    with contextlib.nullcontext(log) if log else tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen([sys.executable, "-m", *command, *place], stdout=log, stderr=log)
        try:
            until, status = time.monotonic() + WAIT, 0
            while status != 200:
                if process.poll() is not None or time.monotonic() > until:
                    log.seek(0)
                    raise SystemExit(f"{command[:2]} did not start: {log.read()[-500:]}")
                time.sleep(0.1)
                with contextlib.suppress(httpx.TransportError):
                    status = httpx.get(f"{url}/health").status_code
            yield url, process.pid
        finally:
            process.terminate()
            process.wait(30)


def tokens_while_all_answer(rounds: list[list[Answer]]) -> tuple[float, float]:
    """Count the tokens that arrive while all clients of a round receive answers. Return tokens and seconds."""
    tokens = seconds = 0.0
    for answers in rounds:
        begin = max(answer.pieces[0] for answer in answers)
        end = min(answer.pieces[-1] for answer in answers)
        if end > begin:
            seconds += end - begin
            for answer in answers:
                share = sum(begin < at <= end for at in answer.pieces) / len(answer.pieces)
                tokens += share * answer.usage["completion_tokens"]
    return tokens, seconds


def measure(command: list[str], tokenizer: Any, length: int, n_clients: int) -> dict[str, Any]:
    """Return a server's figures with `n_clients` clients, each with a document of about `length` tokens."""
    clients = [Client(tokenizer, seed, length) for seed in range(n_clients)]
    pool = ThreadPoolExecutor(n_clients)
    with running(command) as (url, pid), watched(pid) as held, pool:
        # A server may load the model on its first request.
        ask(url, [{"role": "user", "content": "Hello"}], {})
        # All clients ask at the same time, and ask again when all have their answers.
        ask_next = lambda client: client.ask(url)  # noqa: E731
        rounds = [list(pool.map(ask_next, clients)) for _ in range(1 + FOLLOW_UPS)]

    first, later = rounds[0], [answer for answers in rounds[1:] for answer in answers]
    tokens, together = tokens_while_all_answer(rounds)
    details = [answer.usage.get("prompt_tokens_details") or {} for answer in later]
    return {
        "first_seconds": sorted(answer.pieces[0] - answer.sent for answer in first),
        "follow_up_seconds": sorted(answer.pieces[0] - answer.sent for answer in later),
        "together_tokens_per_second": tokens / together if together else None,
        "follow_up_tokens": statistics.mean(a.usage["prompt_tokens"] for a in later),
        "cached_tokens": statistics.mean(found.get("cached_tokens", 0) for found in details),
        "process_bytes": max(held),
        "right": sum(client.n_right for client in clients),
        "questions": len(first) + len(later),
    }


def main() -> None:
    """Measure both servers with each number of clients, on float32 weights, and add the rows."""
    parser = shared_options(__doc__, "servers")
    parser.set_defaults(models=["demo"])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--length", type=int, default=8192, help="tokens of a document")
    args = parser.parse_args()
    (name,) = args.models
    result = Result(args.out, model=name, length=args.length, answer=ANSWER)
    tokenizer = load_model(name)[1]
    with tempfile.TemporaryDirectory() as holder:
        write_float32(name, folder := Path(holder) / name)
        for n in args.clients:
            for server, command in SERVERS.items():
                ours = command[0] == "mlx_snapkv"
                given = ["--concurrency", str(n)] if ours else []
                row = measure([*command, *given, "--model", str(folder)], tokenizer, args.length, n)
                result.add({"clients": n, "server": server, **row})


if __name__ == "__main__":
    main()
