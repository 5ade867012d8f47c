"""A server under all that clients do, for minutes: nothing may grow, die or go unanswered; exit code 1 if it does.

python scripts/soak_server.py --minutes 10
"""

from __future__ import annotations

import argparse
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

ROOT = Path(__file__).parent.parent
sys.path += [str(ROOT / "tests"), str(ROOT / "scripts")]

from results_page import look  # noqa: E402
from soak_clients import Tally, run_all  # noqa: E402

FLAGS = "--snapkv budget=25%,n_sink=4,n_window=32,min_ctx=256 --memory recall --queue 64".split()
FLAGS += "--prefix-bytes 60MB --max-kv-bytes 80MB".split()
EVERY = 2.0  # seconds between two looks
WARM = 1 / 3  # of the time, until which memory may grow: caches fill
MAY_GROW = {"memory": lambda before: 1.10 * before, "files": lambda before: before + 5}
LINES = 400  # of /metrics, whose names must not come from clients
SETTLE = 30.0  # seconds until no request is open


def grown(looks: list[dict[str, int]]) -> list[str]:
    """What has grown after the warm-up, from the first half of the rest to the last quarter of it."""
    rest = looks[int(len(looks) * WARM) :]
    parts = rest[: len(rest) // 2], rest[-(len(rest) // 4) :]
    found = []
    for what, may_grow in MAY_GROW.items():
        if what in rest[0]:
            before, after = (statistics.median(each[what] for each in part) for part in parts)
            print(f"{what}: {before:,.0f} after the warm-up, {after:,.0f} at the end")
            if after > may_grow(before):
                found.append(f"{what}: from {before:,.0f} to {after:,.0f}")
    return found


def metric(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if re.match(rf"{name}\b", line))


def unsettled(url: str) -> list[str]:
    """What is still open, or told too long, when all clients have gone."""
    until = time.monotonic() + SETTLE
    while (n_open := metric(url, "mlx_snapkv_open_requests")) and time.monotonic() < until:
        time.sleep(0.5)
    lines = len(httpx.get(f"{url}/metrics", timeout=60).text.splitlines())
    found = [f"{n_open:.0f} requests are open still"] if n_open else []
    found += [f"/metrics has {lines} lines"] if lines > LINES else []
    if httpx.get(f"{url}/health", timeout=60).status_code != 200:
        found.append("the thread that generates has died")
    return found


def soak(url: str, process: subprocess.Popen[str], minutes: float, seed: int) -> list[str]:
    """What was wrong."""
    tally, looks = Tally(), []
    threads = run_all(url, seed, 60 * minutes, tally)
    until = time.monotonic() + 60 * minutes
    while time.monotonic() < until and process.poll() is None:
        looks.append(look(process.pid))
        time.sleep(EVERY)
    for thread in threads:
        thread.join(300)
    if process.poll() is not None:
        return ["the server has ended", *tally.wrong[:5]]
    print(", ".join(f"{n} {what}" for what, n in sorted(tally.counts.items())))
    print(f"the slowest refusal took {tally.slowest:.1f} s")
    wrong = [f"{len(tally.wrong)} wrong, such as:", *tally.wrong[:10]] if tally.wrong else []
    stuck = [thread.name for thread in threads if thread.is_alive()]
    wrong += [f"{len(stuck)} clients were never answered"] if stuck else []
    return wrong + unsettled(url) + grown(looks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=FLAGS, help="of the server")
    args = parser.parse_args()
    command = [sys.executable, "-m", "mlx_snapkv", "serve", "--model", "demo", "--port", "0"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*command, *args.flags], stdout=subprocess.PIPE, stderr=log, text=True
        )
        try:
            assert process.stdout
            line = process.stdout.readline()
            if " at http://" in line:
                url = line.split(" at ")[1].split()[0]
                wrong = soak(url, process, args.minutes, args.seed)
                process.send_signal(signal.SIGTERM)
                process.wait(30)
            else:
                wrong = ["the server has not started"]
        finally:
            process.kill()
            log.seek(0)
            said = log.read()
    if "Traceback" in said or "failed" in said or process.returncode not in (0, -signal.SIGTERM):
        wrong.append(f"the log has:\n{said[-3000:]}")
    print("\n".join(wrong) if wrong else "nothing was wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
