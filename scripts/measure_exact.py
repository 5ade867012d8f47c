"""How fast answers with `verify="all"` are beside the full cache's, by length; prints the table of docs/sparse.md.

    LD_PRELOAD=.../libopenblas.so.0 OPENBLAS_NUM_THREADS=1 python scripts/measure_exact.py

The random LLaMA's caches are filled with random entries, since only shapes matter for speed. Nearly all its drafts are
right; so that --accepted of them are, now and then the answer goes on with another token than the likeliest. Both
answers are decoded in one process, the full cache's before and behind the other. On a CPU seconds are the processor's,
also those by which the number of drafts is chosen.
"""

import random
from collections.abc import Callable
from functools import partial
from statistics import fmean
from typing import Any
from unittest.mock import patch

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from results_page import clock, figures, options

from mlx_snapkv.caches.layers import attention_layers
from mlx_snapkv.engine import self_speculation
from mlx_snapkv.engine.loop_model import observing
from mlx_snapkv.engine.report import Verified
from mlx_snapkv.engine.self_speculation import SelfSpeculation
from mlx_snapkv.measure.contenders import (
    VOCABULARY,
    Contender,
    decoding_cache,
    make_random_model,
)
from mlx_snapkv.policies import Sparse

SEED = 0
COLUMNS = {
    "entries": "{length:,}",
    "a draft reads": "1/{share}",
    "drafts, accepted": "{drafted}, {right}",
    "stopped after tokens": "{stopped}",
    "tokens that differ": "{differ}",
    "a token of the full cache": "{plain_seconds:.3f} s",
    "times as fast": "{speed:.2f}",
}


def small_caches(model, full: list, share: int, n: int) -> list:
    """Caches whose tokens choose 1/`share` of the full caches' entries, and see the rest by its means."""
    sparse = Sparse(budget=f"{100 / share}%")
    contender = Contender("drafts", sparse.quota(n).entries, sparse)
    small = make_prompt_cache(model)
    for layer in attention_layers(model, small):
        entries = layer.cache_in(full).keys_and_values()
        layer.put(small, contender.cache(layer, *entries, n))
    return small


def answered(call: Callable, n_tokens: int, accepted: float) -> tuple[list[int], list[float]]:
    """The likeliest tokens, each behind what the answer says before, and the seconds that each took."""
    chance, token, tokens, seconds = random.Random(SEED), mx.array([[1]]), [], []
    for _ in range(n_tokens):
        started = clock()
        likeliest = mx.argmax(call(token)[:, -1:], axis=-1)
        tokens.append(likeliest.item())
        seconds.append(clock() - started)
        goes_on = chance.random() < accepted
        token = likeliest if goes_on else mx.array([[chance.randrange(VOCABULARY)]])
    return tokens, seconds


def rewound(call: Callable, full: list, n_tokens: int, accepted: float):
    """As `answered`, on full caches that hold afterwards what they held before."""
    found = answered(call, n_tokens, accepted)
    for cache in full:
        cache.trim(n_tokens)
    return found


def measured(model, full: list, small: list, n_tokens: int, accepted: float) -> dict[str, Any]:
    """The exact answer of `n_tokens` and acceptance, between two of the full cache's."""
    verified, plain = Verified(), partial(model, cache=full)
    wanted, before = rewound(plain, full, n_tokens, accepted)
    with observing(model, small), patch.object(self_speculation, "perf_counter", clock):
        speculation = SelfSpeculation(model, full, small, verified)

        def exact(token: mx.array) -> mx.array:
            logits = speculation(token, full)
            if verified.tokens == n_tokens:
                speculation.close()
            return logits

        found, seconds = rewound(exact, full, n_tokens, accepted)
    _, behind = rewound(plain, full, n_tokens, accepted)
    return {
        "differ": sum(a != b for a, b in zip(found, wanted)),
        "plain_seconds": fmean(before + behind),
        "speed": fmean(before + behind) / fmean(seconds),
        "drafted": verified.drafted,
        "right": verified.accepted,
        "stopped": verified.stopped,
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384, 65536])
    parser.add_argument("--shares", type=int, nargs="+", default=[16, 32])
    parser.add_argument("--accepted", type=float, default=0.98)
    parser.add_argument("--tokens", type=int, default=100)
    args = parser.parse_args()
    model, n_printed = make_random_model(), 0
    for n in args.lengths:
        full = decoding_cache(model, Contender("full cache", n), n)
        # Before answers are added to these buffers: gathering from a part of one copies it.
        small = {share: small_caches(model, full, share, n) for share in args.shares}
        for share in args.shares:
            row = {"length": n, "share": share}
            row |= measured(model, full, small[share], args.tokens, args.accepted)
            print(*figures([row], COLUMNS)[2 if n_printed else 0 :], sep="\n", flush=True)
            n_printed += 1


if __name__ == "__main__":
    main()
