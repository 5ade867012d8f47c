"""For each token, the kernels move at most a fifth of the bytes that full attention reads."""

import mlx.core as mx
import numpy as np
from kernel_cases import Index, normal

from mlx_snapkv.sparse.clusters import CLUSTER_SIZE
from mlx_snapkv.sparse.kernels import launch

D, GROUP, N = 128, 4, 32768  # a KV head of an 8B model, which has 8 of them
N_SINK, N_WINDOW, N_READ = 4, 512, N // 16
# Inputs that each thread, or each threadgroup of `score`, reads again. They fit in the cache of a GPU's core.
SMALL = "queries", "projection", "params", "block_maxima"


def attend(prompt):
    """Make the kernels choose and attend for one query, with an index and means."""
    rng = np.random.default_rng(0)
    n_means = N // CLUSTER_SIZE
    ids = rng.integers(0, n_means, N).astype(np.uint16)
    choosable = np.bincount(ids[N_SINK : N - N_WINDOW], minlength=n_means).astype(np.int32)
    queries = normal(rng, 1, GROUP, 1, D, dtype=mx.bfloat16)
    answer = [x[:, :, :1] for x in prompt]
    borders = {"n_sink": N_SINK, "choice_stop": N - N_WINDOW}
    scale = D**-0.5
    positions, unread = launch.choose(
        queries,
        scale,
        **Index(rng, 1, N, D).arguments(),
        **borders,
        n_chosen=N_READ - N_SINK - N_WINDOW,
        ids=mx.array(ids)[None, None],
        choosable=mx.array(choosable)[None, None],
    )
    mean_entries = (normal(rng, 1, 1, n_means, D, dtype=mx.bfloat16) for _ in range(2))
    factors = mx.zeros((1, 1, GROUP, 1, 1))
    means = launch.Means(*mean_entries, unread, factors, factors)
    launch.attend(
        queries,
        prompt,
        answer,
        scale,
        n_prompt=N,
        n_entries=N + 1,
        **borders,
        positions=positions,
        means=means,
    )


def test_a_token_moves_a_fifth_of_the_bytes(shim, monkeypatch):
    monkeypatch.setattr(launch, "SCORE_GROUPS", launch.SCORE_GROUPS // 8)  # one of 8 heads
    shim.counts_bytes = True
    prompt = [normal(np.random.default_rng(1), 1, 1, N, D, dtype=mx.bfloat16) for _ in range(2)]
    attend(prompt)
    full = sum(x.nbytes for x in prompt)
    moved = read_again = 0
    for launched in shim.launches:
        sizes = dict(zip(launched.moved, [*map(len, launched.inputs), *launched.output_sizes]))
        for name, n in launched.moved.items():
            moved += sizes[name] if name in SMALL else n
            read_again += n if name in SMALL else 0
    assert 0.15 * full < moved < 0.2 * full
    assert read_again < 0.15 * full
    assert [launched.name for launched in shim.launches] == ["score", "select", "attend", "merge"]
