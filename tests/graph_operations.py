"""Operations and waits of a decoded token, counted in its graph.

On a GPU an operation is a launch, and a wait lets it run dry. Both are the same on any machine. What only looks at an
array otherwise (a slice, a reshape, a transposition) launches nothing and is not counted.
"""

import io
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import mlx.core as mx

from mlx_snapkv.caches.layers import attention_layers
from mlx_snapkv.compress.options import Compress
from mlx_snapkv.compress.policies import SnapKV
from mlx_snapkv.engine.loop_model import observing
from mlx_snapkv.measure.contenders import Contender, decoding_cache
from mlx_snapkv.sparse.options import Sparse

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
    policies = [
        Compress(SnapKV(budget="6.25%")),
        Sparse(budget="6.25%", residual=None),
        Sparse(budget="6.25%"),
    ]
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
