"""Operations and waits of a decoded token, counted in its graph, and the time to make that; prints a table.

python scripts/count_operations.py [LENGTH ...]

On a GPU an operation is a launch, and a wait lets it run dry. Both are the same on any machine. What only looks at an
array otherwise (a slice, a reshape, a transposition) launches nothing and is not counted. While a GPU computes a token,
Python makes the graph of the next one: a token takes at least as long.
"""

import io
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import mlx.core as mx

from mlx_snapkv.caches.layers import attention_layers
from mlx_snapkv.engine.loop_model import observing
from mlx_snapkv.measure.contenders import Contender, decoding_cache, make_random_model
from mlx_snapkv.policies import SnapKV, Sparse

LENGTHS = [4096, 12288, 262144]
TIMED = 50  # tokens
VIEWS = {
    "AsStrided", "Broadcast", "BroadcastAxes", "Depends", "ExpandDims", "Flatten", "NumberOfElements", "Reshape",
    "Slice", "Split", "Squeeze", "StopGradient", "Transpose", "Unflatten", "View",
}  # fmt: skip
SORTS = {"ArgPartition", "ArgSort", "Partition", "Sort"}


@dataclass(frozen=True)
class Counts:
    """Of a decoded token, by layer."""

    operations: float
    sorts: float
    waits: int  # of the whole token


def contenders(n: int) -> list[Contender]:
    """What a token may be decoded from after `n` tokens, the full cache first."""
    policies = [SnapKV(budget="6.25%"), Sparse(budget="6.25%", rest=None), Sparse(budget="6.25%")]
    compressed = [Contender(str(policy), n // 16, policy) for policy in policies]
    return [Contender("full cache", n), *compressed]


def count(model, contender: Contender, n: int) -> Counts:
    """Decode one token after `n`, without computing it."""
    cache = decoding_cache(model, contender, n)
    with observing(model, cache):
        mx.eval(model(mx.zeros((1, 1), mx.int32), cache=cache))  # a buffer may grow
        with waits() as counted:
            logits = model(mx.zeros((1, 1), mx.int32), cache=cache)
    layers = len(attention_layers(model, cache))
    found = operations(logits)
    sorts = sum(found[name] for name in SORTS)
    return Counts(found.total() / layers, sorts / layers, counted[0])


def milliseconds(model, contender: Contender, n: int) -> float:
    """By layer, until the graph of a token is there."""
    cache, seconds = decoding_cache(model, contender, n), []
    with observing(model, cache):
        for _ in range(TIMED):
            started = time.perf_counter()
            logits = model(mx.zeros((1, 1), mx.int32), cache=cache)
            seconds.append(time.perf_counter() - started)
            mx.eval(logits)
    return 1000 * statistics.median(seconds) / len(attention_layers(model, cache))


def operations(array: mx.array) -> Counter[str]:
    """What is launched to compute it."""
    dot = io.StringIO()
    mx.export_to_dot(dot, array)
    names = [label.split()[0] for label in re.findall(r'\[label ="([^"]+)"', dot.getvalue())]
    return Counter(name for name in names if name not in VIEWS)


@contextmanager
def waits() -> Iterator[list[int]]:
    """The number of times that a block waits for the device, in a list."""
    counted, evaluate = [0], mx.eval

    def counting(*arrays):
        counted[0] += 1
        return evaluate(*arrays)

    mx.eval = counting
    try:
        yield counted
    finally:
        mx.eval = evaluate


def main() -> None:
    model = make_random_model()
    print("| entries | | operations a layer | sorts | waits | ms a layer to make the graph |")
    print("|---|---|---|---|---|---|")
    for n in [int(x) for x in sys.argv[1:]] or LENGTHS:
        for contender in contenders(n):
            found, made = count(model, contender, n), milliseconds(model, contender, n)
            print(
                f"| {n:,} | {contender.name} | {found.operations:.1f} | {found.sorts:.0f} "
                f"| {found.waits} | {made:.2f} |"
            )


if __name__ == "__main__":
    main()
