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
from results_page import Result, result_options, watched

from mlx_snapkv.cli.loading import load_model
from mlx_snapkv.demo import MODELS
from mlx_snapkv.demo.questions import make_haystack

FOLLOW_UPS = 3  # questions after the first
ANSWER = 64  # tokens per answer; end-of-answer tokens are forbidden
NEVER = -100.0  # OpenAI's smallest logit_bias
WAIT = 600  # seconds within which a server must start
SERVERS = {
    "mlx_lm.server": ("mlx_lm", "server"),
    "ours, sparse": ("mlx_snapkv", "serve", "--sparse", "budget=6.25%,read=sparse"),
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
        self._unsent_document = f"{document}\n\n"
        self._no_end = {str(token): NEVER for token in tokenizer.eos_token_ids}
        self._messages: list[Any] = []
        self.n_right = 0

    def ask(self, url: str) -> Answer:
        """Ask the next question and return the answer."""
        fact = self._facts[len(self._messages) // 2]
        self._messages.append(
            {"role": "user", "content": f"{self._unsent_document}{fact.question}"}
        )
        answer = ask(url, self._messages, self._no_end)
        self._messages.append({"role": "assistant", "content": answer.text})
        self.n_right += fact.value in answer.text
        self._unsent_document = ""
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
            if event.usage:
                answer.usage = event.usage.to_dict()
            piece = "".join(choice.delta.content or "" for choice in event.choices)
            if piece:
                answer.text += piece
                answer.pieces.append(time.perf_counter())
    return answer


def write_float32(model_name: str, folder: Path) -> None:
    """Write a built-in model in float32, so that all servers compute in float32. On a CPU, ours would do so anyway."""
    shutil.copytree(MODELS[model_name], folder)
    file = str(folder / "model.safetensors")
    weights: Any = mx.load(file)
    float32_weights = {name: weight.astype(mx.float32) for name, weight in weights.items()}
    mx.eval(float32_weights)
    mx.save_safetensors(file, float32_weights, {"format": "mlx"})


@contextlib.contextmanager
def running(command: list[str], log: IO[str] | None = None) -> Iterator[tuple[str, int]]:
    """Run a server during the block. Yield its URL and process id, and write its output to `log`."""
    with socket.create_server(("127.0.0.1", 0)) as free_socket:
        _, port = free_socket.getsockname()
    url = f"http://127.0.0.1:{port}"
    words = [sys.executable, "-m", *command, "--host", "127.0.0.1", "--port", str(port)]
    with contextlib.nullcontext(log) if log else tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log)
        try:
            if not _becomes_healthy(url, process):
                log.seek(0)
                raise SystemExit(f"{command[:2]} did not start: {log.read()[-500:]}")
            yield url, process.pid
        finally:
            process.terminate()
            process.wait(30)


def _becomes_healthy(url: str, process: subprocess.Popen) -> bool:
    """Wait for a server. Return True once it answers, and False if it ends or does not answer in `WAIT` seconds."""
    deadline = time.monotonic() + WAIT
    while process.poll() is None and time.monotonic() <= deadline:
        time.sleep(0.1)
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health").status_code == 200:
                return True
    return False


def tokens_while_all_answer(rounds: list[list[Answer]]) -> tuple[float, float]:
    """Count the tokens that arrive while all clients of a round receive answers. Return tokens and seconds."""
    n_tokens = seconds = 0.0
    for answers in rounds:
        start = max(answer.pieces[0] for answer in answers)
        end = min(answer.pieces[-1] for answer in answers)
        if end > start:
            seconds += end - start
            for answer in answers:
                n_pieces_together = sum(start < arrival <= end for arrival in answer.pieces)
                share = n_pieces_together / len(answer.pieces)
                n_tokens += share * answer.usage["completion_tokens"]
    return n_tokens, seconds


def measure(command: list[str], tokenizer: Any, length: int, n_clients: int) -> dict[str, Any]:
    """Return a server's figures with `n_clients` clients, each with a document of about `length` tokens."""
    clients = [Client(tokenizer, seed, length) for seed in range(n_clients)]
    pool = ThreadPoolExecutor(n_clients)
    with running(command) as (url, pid), watched(pid) as process_bytes, pool:
        # A server may load the model on its first request.
        ask(url, [{"role": "user", "content": "Hello"}], {})
        # All clients ask at the same time, and ask again when all have their answers.
        ask_next = lambda client: client.ask(url)  # noqa: E731
        rounds = [list(pool.map(ask_next, clients)) for _ in range(1 + FOLLOW_UPS)]

    first_answers, *follow_up_rounds = rounds
    follow_ups = [answer for answers in follow_up_rounds for answer in answers]
    n_tokens, seconds_together = tokens_while_all_answer(rounds)
    details = [answer.usage.get("prompt_tokens_details") or {} for answer in follow_ups]
    return {
        "first_seconds": sorted(answer.pieces[0] - answer.sent for answer in first_answers),
        "follow_up_seconds": sorted(answer.pieces[0] - answer.sent for answer in follow_ups),
        "together_tokens_per_second": n_tokens / seconds_together if seconds_together else None,
        "follow_up_tokens": statistics.mean(answer.usage["prompt_tokens"] for answer in follow_ups),
        "cached_tokens": statistics.mean(usage.get("cached_tokens", 0) for usage in details),
        "process_bytes": max(process_bytes),
        "right": sum(client.n_right for client in clients),
        "questions": len(first_answers) + len(follow_ups),
    }


def main() -> None:
    """Measure both servers with each number of clients, on float32 weights, and add the rows."""
    parser = result_options(__doc__, "servers")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--length", type=int, default=8192, help="tokens of a document")
    args = parser.parse_args()
    result = Result(args.out, model=args.model, length=args.length, answer=ANSWER)
    _, tokenizer = load_model(args.model)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / args.model
        write_float32(args.model, folder)
        for n_clients in args.clients:
            for server, (module, *options) in SERVERS.items():
                command = [module, *options, "--model", str(folder)]
                if module == "mlx_snapkv":
                    command += ["--concurrency", str(n_clients)]
                figures = measure(command, tokenizer, args.length, n_clients)
                result.add({"clients": n_clients, "server": server, **figures})


if __name__ == "__main__":
    main()
