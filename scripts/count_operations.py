"""Count operations and waits per prompt and per decoded token, for each policy and for sparse attention.

    python scripts/count_operations.py
    python scripts/count_operations.py --tokens 32768

The model has random weights. Operations are counted in the graphs that MLX evaluates, on the CPU, Metal or CUDA.
Counts are higher on a CPU, where RoPE, norms and attention are several operations; on a GPU each is one operation.

Counts are not times: a large operation counts as much as a small one. On a GPU, an operation is one or more launches: a
sort of 32,768 numbers takes about ten. Views of an array (a slice, a reshape, a transposition) launch nothing and are
not counted.

A wait is a call that makes Python wait for the device: `mx.eval`, `item`, `tolist`, or a conversion to a number or to
NumPy. It counts even if the array is already computed. mlx-lm's own loop waits once for each chunk of a prompt,
and once for its first token. `mx.async_eval` is not a wait, although MLX may delay it if the device is far behind.
"""

import io
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from results_page import options

from mlx_snapkv import SnapKVError
from mlx_snapkv.caches.layers import attention_layers
from mlx_snapkv.compress.options import Compress
from mlx_snapkv.compress.policies import SnapKV
from mlx_snapkv.engine.loop_model import observing_queries
from mlx_snapkv.engine.prefill import read
from mlx_snapkv.engine.request import Request
from mlx_snapkv.measure.contenders import (
    Contender,
    decoding_cache,
    full_and_policies,
    make_random_model,
    random_prompt,
)
from mlx_snapkv.measure.methods import FULL_CACHE
from mlx_snapkv.measure.tables import Table, as_markdown
from mlx_snapkv.planning.config import CompressionConfig
from mlx_snapkv.planning.prompt_plan import PREFILL_STEP_SIZE
from mlx_snapkv.planning.request_plan import plan_request
from mlx_snapkv.planning.settings import Setting
from mlx_snapkv.sparse.options import Sparse

VIEWS = {
    "AsStrided", "Broadcast", "BroadcastAxes", "Depends", "ExpandDims", "Flatten", "NumberOfElements", "Reshape",
    "Slice", "Split", "Squeeze", "StopGradient", "Transpose", "Unflatten", "View",
}  # fmt: skip
SORTS = {"ArgPartition", "ArgSort", "Partition", "Sort"}
CONVERSIONS = "item", "tolist", "__bool__", "__float__", "__int__", "__index__"
TO_NUMPY = [(np, name) for name in ("array", "asarray", "stack", "concatenate")]

SHARE = "budget=6.25%"
METHODS: dict[str, dict[str, Any]] = {
    FULL_CACHE: {},
    "SnapKV": {"policy": f"snapkv:{SHARE}"},
    "TOVA": {"policy": f"tova:{SHARE},schedule=once"},
    "H2O": {"policy": f"h2o:{SHARE},schedule=once"},
    "KeyDiff": {"policy": f"keydiff:{SHARE},schedule=once"},
    "KeyDiff in blocks": {"policy": f"keydiff:{SHARE}"},
    "sparse, no residual": {"sparse": f"{SHARE},when=always,residual=none"},
    "sparse": {"sparse": f"{SHARE},when=always"},
}


@dataclass
class Counts:
    """Operations and waits of a block of code.

    Attributes:
        operations: number of operations of each kind.
        waits: number of times that Python waits.
    """

    operations: Counter[str] = field(default_factory=Counter)
    waits: int = 0

    @property
    def sorts(self) -> int:
        """Return the number of sorts."""
        return sum(self.operations[name] for name in SORTS)


def operations_of(*arrays: Any) -> Counter[str]:
    """Return the operations launched to compute arrays or trees of arrays."""
    dot = io.StringIO()
    mx.export_to_dot(dot, *arrays)
    labels = re.findall(r'\[label ="([^"]+)"', dot.getvalue())  # such as [label ="Slice start=0"]
    names = [label.split()[0] for label in labels]
    return Counter(name for name in names if name not in VIEWS)


@contextmanager
def counting_operations() -> Iterator[Counts]:
    """Count the operations and waits in the block, and yield the counts."""
    counts = Counts()

    def with_counting(function: Callable[..., Any], waits: bool) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            leaves = [leaf for _, leaf in tree_flatten(list(args))]
            arrays = [leaf for leaf in leaves if isinstance(leaf, mx.array)]
            counts.operations += operations_of(*arrays)
            if waits and arrays:
                counts.waits += 1
            return function(*args, **kwargs)

        return call

    waiting_functions = [(mx, "eval"), *((mx.array, name) for name in CONVERSIONS), *TO_NUMPY]
    with ExitStack() as originals:
        for owner, name in [*waiting_functions, (mx, "async_eval")]:
            function = getattr(owner, name)
            originals.callback(setattr, owner, name, function)
            waits = (owner, name) in waiting_functions
            setattr(owner, name, with_counting(function, waits))
        yield counts


def count_prompt(model: Any, prompt: mx.array, **method: Any) -> tuple[Counts, Counts]:
    """Return the counts for reading a prompt, and for the step at its end that compresses it or builds an index."""
    loop_options: dict[str, Any] = {"prefill_step_size": PREFILL_STEP_SIZE}
    if not method:
        with counting_operations() as reading:
            read(model, prompt, make_prompt_cache(model), loop_options)
        return reading, Counts()
    config, _ = CompressionConfig.from_keywords(method)
    plan = plan_request(model, config, prompt.size)
    if plan.is_left_to_mlx_lm:
        raise SnapKVError(str(plan.reason))
    request = Request(model, plan)
    loop_options["prefill_step_size"] = plan.chunk_size(PREFILL_STEP_SIZE)
    with request.recording():
        with counting_operations() as reading:
            read(request.model, prompt, request.caches, loop_options)
        with counting_operations() as ending:
            request.compress()
    return reading, ending


def contenders(n_tokens: int) -> list[Contender]:
    """Return the caches that a token may be decoded from after `n_tokens` tokens, with the full cache first."""
    policies: list[Setting] = [
        Compress(SnapKV(budget="6.25%")),
        Sparse(budget="6.25%", residual=None),
        Sparse(budget="6.25%"),
    ]
    return full_and_policies(n_tokens, policies)


def count_token(model: Any, contender: Contender, n_tokens: int) -> Counts:
    """Return the counts for one token that is decoded after `n_tokens` tokens."""
    cache = decoding_cache(model, contender, n_tokens)
    token = mx.zeros((1, 1), mx.int32)
    with observing_queries(model, cache):
        mx.eval(model(token, cache=cache))  # a buffer may grow in the first step
        with counting_operations() as counts:
            mx.async_eval(model(token, cache=cache))
    return counts


def prompts_table(model: Any, n_tokens: int, n_layers: int) -> Table:
    """Return the counts for a prompt of `n_tokens` tokens, by method."""
    columns = [
        "prompt",
        "operations per layer, read",
        "operations per layer, at the end",
        "waits, read",
        "waits, at the end",
    ]
    table = Table("", "", columns)
    prompt = random_prompt(n_tokens)
    for name, method in METHODS.items():
        reading, ending = count_prompt(model, prompt, **method)
        table.add(
            name,
            f"{reading.operations.total() / n_layers:,.0f}",
            f"{ending.operations.total() / n_layers:,.0f}",
            str(reading.waits),
            str(ending.waits),
        )
    return table


def tokens_table(model: Any, n_tokens: int, n_layers: int) -> Table:
    """Return the counts for a token that is decoded after `n_tokens` tokens, by contender."""
    table = Table("", "", ["token", "operations per layer", "sorts per layer", "waits"])
    for contender in contenders(n_tokens):
        counts = count_token(model, contender, n_tokens)
        table.add(
            contender.name,
            f"{counts.operations.total() / n_layers:.1f}",
            f"{counts.sorts / n_layers:.1f}",
            str(counts.waits),
        )
    return table


def main() -> None:
    """Print how many operations a prompt and a token launch, for each method and contender."""
    parser = options(__doc__)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the prompt")
    args = parser.parse_args()
    model = make_random_model()
    n_layers = len(attention_layers(model, make_prompt_cache(model)))
    print(f"{args.tokens:,} tokens, {n_layers} layers, {mx.default_device()}\n")
    try:
        print(as_markdown(prompts_table(model, args.tokens, n_layers)), end="\n\n")
        print(as_markdown(tokens_table(model, args.tokens, n_layers)))
    except SnapKVError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
