"""Let agents work with the server, then check its memory, its answers and its errors.

    python scripts/soak.py      # SmolLM2 and a small hybrid, ten minutes each; exit code 1 if a check fails
    python scripts/soak.py --model FOLDER --minutes 2 --formats mistral

For each tool-call format, a server process serves the model for a share of the time. Eight sessions use the three
APIs. Their contexts grow until the server rejects them, and are then replaced with a summary. Sessions go back to
earlier turns, repeat requests, abandon streams, and force calls and JSON. Their prefixes exceed the prefix cache.
"""

import argparse
import contextlib
import json
import os
import random
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import IO

import httpx
from measure_servers import running, write_float32
from results_page import ROOT, memory_of, options
from soak_apis import APIS
from soak_models import CALLS, write_folder
from soak_session import TOO_LONG, WAIT, Sent, Session, post

from mlx_snapkv.demo import MODELS
from mlx_snapkv.planning.units import format_bytes

SMOLLM2 = ROOT / "real-models" / "smollm2-135m-instruct"
HYBRID = "demo-qwen3-next"
WARM_UP = 60  # seconds, at most `WARM_UP_SHARE` of the whole time; its second half gives the memory to compare with
WARM_UP_SHARE = 0.4
MAX_GROWTH = 1.1  # final memory, as a multiple of the memory at the warm-up's end
PROGRESS = 10  # seconds between progress lines
# glibc keeps freed memory for the thread that freed it, unless there is only one arena. It also keeps gaps between the
# small arrays of a tiny model, unless arrays are outside the heap. With these settings, only leaks make memory grow.
ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "4096"}
N_SHOWN = 3  # failures shown in full
# A line such as `mlx_snapkv_kv_bytes{kind="prefixes"} 1024.0` or `mlx_snapkv_open_requests 2.0`.
METRIC = re.compile(
    r'mlx_snapkv_(?:\w+_bytes\{kind="(?P<kind>\w+)"\}|(?P<name>open_requests)) (?P<value>\S+)'
)


@dataclass
class Reading:
    """A server's memory in bytes, and its open requests.

    Attributes:
        resident: memory of the process.
        prefixes, requests: KV memory of the prefix cache and of running requests, as reported by the server.
        freed_buffers: memory that MLX keeps for new arrays, as reported by the server.
        open_requests: number of requests that are waiting or being answered.
    """

    resident: int
    prefixes: int
    requests: int
    freed_buffers: int
    open_requests: int

    @classmethod
    def of(cls, url: str, pid: int) -> "Reading":
        """Read the memory of the server at `url` with process id `pid`."""
        lines = httpx.get(f"{url}/metrics", timeout=WAIT).text.splitlines()
        metrics = {}
        for match in filter(None, map(METRIC.match, lines)):
            metrics[match["kind"] or match["name"]] = int(float(match["value"]))
        return cls(
            resident=memory_of(pid),
            prefixes=metrics["prefixes"],
            requests=metrics["requests"],
            freed_buffers=metrics["freed_buffers"],
            open_requests=metrics["open_requests"],
        )

    @property
    def remaining(self) -> int:
        """Return the process's memory without prefixes, running requests and freed buffers."""
        return self.resident - self.prefixes - self.requests - self.freed_buffers

    def __str__(self) -> str:
        """Summarise the figures."""
        amounts = self.resident, self.prefixes, self.requests, self.freed_buffers
        sizes = map(format_bytes, amounts)
        return "resident {}, prefixes {}, requests {}, freed buffers {}".format(*sizes)


@dataclass
class Soak:
    """A model with one tool-call format, and the sessions that use it.

    Attributes:
        folder: the model's folder.
        flags: server flags.
        prefix_bytes: size limit of the prefix cache.
        seconds: how long the sessions run.
        sessions: the sessions.
        max_growth: see `MAX_GROWTH`.
        failures: one sentence per failed check.
    """

    folder: Path
    flags: list[str]
    prefix_bytes: int
    seconds: float
    sessions: list[Session]
    max_growth: float = MAX_GROWTH
    failures: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Run the sessions, then check the server and its answers."""
        with self._server() as (url, pid, log):
            early, late = self._work(url, pid)
            self._check_memory(early, late)
            self._check_idle(self._idle(url, pid))
            self._check_prefixes(max(reading.prefixes for reading in [*early, *late]))
            self._check_requests()
            self._check_log(log)
        with self._server() as (url, _, _):
            self._check_answers(url)

    @contextlib.contextmanager
    def _server(self) -> Iterator[tuple[str, int, IO[str]]]:
        """Run a server. Yield its URL, process id and log."""
        command = ["mlx_snapkv", "serve", "--model", str(self.folder), *self.flags]
        command += ["--prefix-bytes", str(self.prefix_bytes)]
        with tempfile.TemporaryFile("w+") as log, running(command, log) as (url, pid):
            yield url, pid, log

    def _work(self, url: str, pid: int) -> tuple[list[Reading], list[Reading]]:
        """Run the sessions. Return the readings during the warm-up and after it, one per second."""
        begin = time.monotonic()
        warm_up = min(WARM_UP, WARM_UP_SHARE * self.seconds)
        with self._progress(url, pid) as readings, ThreadPoolExecutor(len(self.sessions)) as pool:
            until = begin + self.seconds
            list(pool.map(lambda session: session.run(url, until), self.sessions))
        n_warm_up = max(2, round(len(readings) * warm_up / (time.monotonic() - begin)))
        return readings[:n_warm_up], readings[n_warm_up:]

    def _idle(self, url: str, pid: int) -> Reading:
        """Return the memory once no request is open, or after ten seconds."""
        reading = Reading.of(url, pid)
        for _ in range(100):  # a request stays open for a moment after its client has left
            if not reading.open_requests and not reading.requests:
                break
            time.sleep(0.1)
            reading = Reading.of(url, pid)
        return reading

    @contextlib.contextmanager
    def _progress(self, url: str, pid: int) -> Iterator[list[Reading]]:
        """Read the memory every second and print it every `PROGRESS` seconds; yield the list of readings."""
        has_ended = threading.Event()
        readings: list[Reading] = []

        def watch() -> None:
            while not has_ended.wait(1):
                readings.append(Reading.of(url, pid))
                if len(readings) % PROGRESS == 0:
                    print(f"    {len(self._sent)} requests, {readings[-1]}", flush=True)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield readings
        finally:
            has_ended.set()
            watcher.join()

    @property
    def _sent(self) -> list[Sent]:
        return [sent for session in self.sessions for sent in session.sent]

    def _check(self, holds: bool, sentence: str) -> None:
        """Print a sentence and record it as a failure if it does not hold."""
        print(f"  {'ok' if holds else 'FAILED'}: {sentence}", flush=True)
        if not holds:
            self.failures.append(f"{self.folder.name}: {sentence}")

    def _check_memory(self, early: list[Reading], late: list[Reading]) -> None:
        """Check that the server's own memory has not grown since the warm-up.

        Compare medians of equally many readings, because a single reading also depends on the chunk being processed.
        """
        n_readings = -(-len(early) // 2)
        before = median(reading.remaining for reading in early[-n_readings:])
        after = median(reading.remaining for reading in late[-n_readings:])
        sizes = f"{format_bytes(round(before))} at the warm-up's end, {format_bytes(round(after))} at the end"
        sentence = (
            "memory beside prefixes, requests and freed buffers grew to "
            f"{after / before:.2f} ({sizes})"
        )
        self._check(after <= self.max_growth * before, sentence)

    def _check_idle(self, reading: Reading) -> None:
        """Check that no request is left open."""
        is_idle = not reading.requests and not reading.open_requests
        sentence = (
            f"{reading.open_requests} requests, {reading.requests} bytes of requests are left"
        )
        self._check(is_idle, sentence)

    def _check_prefixes(self, max_prefixes: int) -> None:
        """Check that prefixes stayed within their limit."""
        used, limit = map(format_bytes, (max_prefixes, self.prefix_bytes))
        self._check(max_prefixes <= self.prefix_bytes, f"prefixes took up to {used} of {limit}")

    def _check_requests(self) -> None:
        """Check that requests failed only if their prompts were too long, and that JSON follows its schema."""
        counts = sum((session.counts for session in self.sessions), Counter[str]())
        actions = ", ".join(f"{n_times} {name}" for name, n_times in sorted(counts.items()))
        failed = [sent for sent in self._sent if sent.error and TOO_LONG not in sent.error]
        errors = "".join(f"\n    {sent.status} {sent.error[:300]}" for sent in failed[:N_SHOWN])
        sentence = f"{len(failed)} of {len(self._sent)} requests failed ({actions}){errors}"
        self._check(not failed, sentence)
        texts = [sent.answer.text for sent in self._sent if sent.answer and sent.has_schema]
        wrong_texts = [text for text in texts if not _follows_schema(text)]
        sentence = (
            f"{len(wrong_texts)} of {len(texts)} JSON answers are wrong {wrong_texts[:N_SHOWN]}"
        )
        self._check(not wrong_texts, sentence)

    def _check_log(self, log: IO[str]) -> None:
        """Check that the server's log has no traceback and no status 500 or above."""
        log.seek(0)
        lines = log.read().splitlines()
        server_error = re.compile(r"/v1/\S+ 5\d\d ")  # such as "/v1/messages 500 "
        errors = [line for line in lines if "Traceback" in line or server_error.search(line)]
        sentence = f"{len(errors)} errors in {len(lines)} lines of the log {errors[:N_SHOWN]}"
        self._check(not errors, sentence)

    def _check_answers(self, url: str) -> None:
        """Check answers against the same requests sent alone, one by one, for half of the sessions' time."""
        by_request: dict[str, list[Sent]] = {}
        for sent in self._sent:
            if sent.answer is not None:
                by_request.setdefault(sent.key, []).append(sent)
        groups = list(by_request.values())
        random.Random(0).shuffle(groups)
        deadline = time.monotonic() + self.seconds / 2
        n_compared = 0
        differing: list[tuple[Sent, Sent]] = []
        with httpx.Client(base_url=url, timeout=WAIT) as client:
            for group in groups:
                any_sent = group[0]
                alone = post(client, APIS[any_sent.path], any_sent.body, streams=False)
                differing += [(sent, alone) for sent in group if sent.answer != alone.answer]
                n_compared += len(group)
                if time.monotonic() > deadline:
                    break
        n_answers = sum(map(len, groups))
        answers = "".join(
            f"\n    {sent.answer}\n    alone: {alone.answer or alone.error}"
            for sent, alone in differing[:N_SHOWN]
        )
        sentence = f"{len(differing)} of {n_compared} answers differ from the answers to the requests alone"
        self._check(not differing, f"{sentence} ({n_answers} answers in all){answers}")


def _follows_schema(text: str) -> bool:
    """Return whether a text is JSON that follows the sessions' schema."""
    with contextlib.suppress(ValueError):
        value = json.loads(text)
        return set(value) == {"done", "next"} and isinstance(value["done"], bool)
    return False


def soak(model: str, tool_format: str, seconds: float, args: argparse.Namespace) -> list[str]:
    """Run sessions with a model and a tool-call format, and return the failed checks.

    Args:
        model: a folder, or the name of a built-in model.
        tool_format: a key of `CALLS`.
        seconds: how long the sessions run.
        args: the command's other options.
    """
    name = Path(model).name
    print(f"{name}, {tool_format}, {args.sessions} sessions, {seconds:.0f} s", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(model)
        if model in MODELS:
            # Half precision rounds differently for a batch and for a single request.
            source = Path(temporary) / "float32"
            write_float32(model, source)
        folder = Path(temporary) / f"{name}-{tool_format}"
        write_folder(source, tool_format, folder)
        sessions = [Session(n, args.seed) for n in range(args.sessions)]
        flags = ["--max-context", str(args.max_context), *args.serve.split()]
        test = Soak(folder, flags, args.prefix_bytes, seconds, sessions, args.max_growth)
        test.run()
    return test.failures


def parser() -> argparse.ArgumentParser:
    """Return the command's argument parser."""
    argument_parser = options(__doc__)
    models = [str(SMOLLM2), HYBRID]
    argument_parser.add_argument(
        "--model", nargs="+", default=models, help="folders or built-in models"
    )
    argument_parser.add_argument("--minutes", type=float, default=10, help="for each model")
    argument_parser.add_argument("--formats", nargs="+", choices=list(CALLS), default=list(CALLS))
    argument_parser.add_argument("--sessions", type=int, default=8)
    argument_parser.add_argument("--seed", type=int, default=0)
    argument_parser.add_argument(
        "--max-context", type=int, default=1200, help="of the server, in tokens"
    )
    argument_parser.add_argument(
        "--prefix-bytes", type=int, default=40_000_000, help="of the server"
    )
    argument_parser.add_argument("--serve", default="", help="more flags of the server")
    argument_parser.add_argument("--max-growth", type=float, default=MAX_GROWTH, help="of memory")
    return argument_parser


def main() -> None:
    """Soak each model in each format, print the failed checks, and exit with 1 if there are any."""
    args = parser().parse_args()
    os.environ |= ALLOCATOR
    seconds = 60 * args.minutes / len(args.formats)
    failures = []
    for model in args.model:
        for tool_format in args.formats:
            failures += soak(model, tool_format, seconds, args)
    print(*(failures or ["All checks hold."]), sep="\n")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
