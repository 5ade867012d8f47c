"""A server as it is, and what its batches hold: `python -m mlx_snapkv.bench.served mlx_lm server --model …`.

The module is run with its arguments as `python -m` runs it. For every line on standard input there is a line of JSON on
standard output, a `Figures` since the one before; where input ends, so does the server. mlx-lm's `BatchGenerator` and
`LRUPromptCache`, which both servers build on, are looked at where they have done a step; nothing else is changed.
"""

import dataclasses
import functools
import json
import os
import runpy
import signal
import statistics
import sys
import threading
from dataclasses import dataclass, field

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import LRUPromptCache

from .own_memory import OwnMemory


@dataclass
class Figures:
    """What a server holds, in bytes.

    Attributes:
        kv_bytes: keys and values of the requests in the batch, the median after steps in which so many of them got a
            token, by how many.
        prefix_bytes: those kept of earlier prompts, now.
        peak_bytes: MLX's most, since the process began.
        own_bytes: what the process took from the system (`own_memory`), the most since it began.
    """

    kv_bytes: dict[int, int] = field(default_factory=dict)
    prefix_bytes: int = 0
    peak_bytes: int = 0
    own_bytes: int = 0


class Watch:
    """Looks at every step of mlx-lm's batches in this process."""

    def __init__(self) -> None:
        self._kv_bytes: dict[int, list[int]] = {}
        self._prefixes: LRUPromptCache | None = None

    def start(self) -> None:
        step, insert = BatchGenerator.next, LRUPromptCache.insert_cache

        @functools.wraps(step)
        def next(generator):
            read, answered = step(generator)
            self._kv_bytes.setdefault(len(answered), []).append(generator.prompt_cache_nbytes)
            return read, answered

        @functools.wraps(insert)
        def insert_cache(prefixes, *args, **kwargs):
            self._prefixes = prefixes
            return insert(prefixes, *args, **kwargs)

        setattr(BatchGenerator, "next", next)  # noqa: B010  # which mypy allows no other way
        setattr(LRUPromptCache, "insert_cache", insert_cache)  # noqa: B010

    def figures(self, own: OwnMemory) -> Figures:
        steps, self._kv_bytes = self._kv_bytes, {}
        held = {n: statistics.median_low(found) for n, found in steps.items()}
        kept = 0 if self._prefixes is None else self._prefixes.nbytes
        return Figures(held, kept, mx.get_peak_memory(), own.most)


def _tell(watch: Watch, own: OwnMemory) -> None:
    for _ in sys.stdin:
        print(json.dumps(dataclasses.asdict(watch.figures(own))), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)  # who asked has gone


def main() -> None:
    watch, own = Watch(), OwnMemory()
    watch.start()
    del sys.argv[0]
    with own.watched():
        threading.Thread(target=_tell, args=(watch, own), daemon=True).start()
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
