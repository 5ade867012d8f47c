"""Inputs for the GPU kernels, and float64 NumPy references that share no code with the package."""

import mlx.core as mx
import numpy as np

from mlx_snapkv.sparse.kernels.launch import NO_SINK, Means, attend

# Head size, query heads per KV head, dtype.
VARIANTS = [
    (64, 1, mx.float32), (128, 4, mx.float16), (80, 7, mx.bfloat16), (128, 16, mx.float16), (256, 2, mx.float32),
]  # fmt: skip
NUMBERS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
MXFP4 = np.concatenate([NUMBERS, -NUMBERS])
SPARE = 37  # free rows of a buffer, which no kernel may read
LEAST_HALF = -65504.0


def float64(array):
    return np.array(array.astype(mx.float32), np.float64)


def normal(rng, *shape, dtype=mx.float32):
    return mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)


class Index:
    """An index of `n` random keys per KV head (`H` heads): projection, codes and powers of two."""

    def __init__(self, rng, H, n, D):
        K = -(-D // 64) * 32
        self.projection = normal(rng, 1, H, D, K)
        self.codes = rng.integers(0, 1 << 32, (1, H, n + SPARE, K // 8), np.uint32)
        self.powers = rng.integers(124, 127, (1, H, n + SPARE, K // 32), np.uint8)
        self.powers[:, :, n:] = 255  # NaN
        self.n = n

    def arguments(self):
        codes, powers = mx.array(self.codes), mx.array(self.powers)
        return {"projection": self.projection, "codes": codes, "powers": powers}

    def logits(self, queries, scale):
        """Return the logits `(n_heads, n)` of the first `n` keys."""
        words = self.codes[0, :, : self.n, :, None] >> (4 * np.arange(8, dtype=np.uint32)) & 15
        H, n = words.shape[:2]
        numbers = MXFP4[words.reshape(H, n, -1)]
        powers = self.powers[0, :, : self.n].astype(np.float64)
        factors = np.where(powers == 255, np.nan, np.exp2(powers - 127))
        components = (numbers.reshape(H, n, -1, 32) * factors[..., None]).reshape(H, n, -1)
        grouped = float64(queries).reshape(H, -1, queries.shape[3]) * scale
        found = grouped @ float64(self.projection)[0] @ components.swapaxes(1, 2)
        return found.reshape(-1, n)


def ranks(logits_of_blocks, maxima, group, block):
    """Return the ranks that `select` compares: half-precision distances from the best score, at most 65504.

    `logits_of_blocks` `(n_heads, n)` are half-precision distances from each block's maximum. `maxima` `(n_heads,
    n_blocks)` are float32.
    """
    heads, n = logits_of_blocks.shape
    largest = maxima.max(axis=1, keepdims=True)
    offsets = np.repeat(maxima - largest, block, axis=1)[:, :n]
    with np.errstate(invalid="ignore"):
        scores = logits_of_blocks.astype(np.float32) + offsets
    scores[np.isnan(scores) | (largest <= -3e38)] = -3e38
    scores = scores.reshape(heads // group, group, n).max(axis=1)
    return np.minimum(-scores, 65504).astype(np.float16)


def softmax_of_items(logits, values, sink):
    """Return the attention to `values` `(n, D)` for `logits` `(n,)`. The sink takes a share of the softmax."""
    with np.errstate(invalid="ignore", over="ignore"):
        top = np.fmax(np.fmax.reduce(logits), sink)
        weights = np.exp(logits - top)
        return weights @ values / (weights.sum() + np.exp(sink - top))


N_PROMPT = 900
TOLERANCES = {mx.float32: 2e-5, mx.float16: 2e-3, mx.bfloat16: 1.6e-2}


class Token:
    """The arguments of `attend` for one token, and the token's attention in float64."""

    def __init__(
        self, variant, H=2, n_means=5, n_chosen=130, first=4, window=33, n_own=7, with_sinks=True
    ):
        D, group, dtype = variant
        self.rng = rng = np.random.default_rng(n_chosen + n_own)
        self.H, self.group, self.dtype = H, group, dtype
        self.scale = D**-0.5
        self.n, self.first, self.stop = N_PROMPT + n_own, first, N_PROMPT - window
        self.queries = normal(rng, 1, H * group, 1, D, dtype=dtype)
        self.prompt = [self.buffer(N_PROMPT, D) for _ in range(2)]
        self.answer = [self.buffer(n_own, D) for _ in range(2)]
        self.positions = self.means = self.sinks = None
        if n_chosen:
            numbers = rng.integers(first, self.stop, (1, H, n_chosen)).astype(np.uint32)
            self.positions = mx.array(numbers)
        if n_means:
            unread = rng.integers(0, 300, (1, H, n_means)) * (rng.random((1, H, n_means)) < 0.7)
            factors = np.full((1, H, group, 1, 1), np.log(0.5), np.float32)
            factors.reshape(-1)[1::3] = NO_SINK
            self.means = Means(
                normal(rng, 1, H, n_means, D, dtype=dtype),
                normal(rng, 1, H, n_means, D, dtype=dtype),
                mx.array(unread.astype(np.uint32)),
                mx.array(factors),
                mx.full(factors.shape, 0.75),
            )
        if with_sinks:
            self.sinks = normal(rng, H * group)

    def buffer(self, n, D):
        """Return random entry rows, followed by unused rows of NaN."""
        free = mx.full((1, self.H, SPARE, D), mx.nan, self.dtype)
        rows = normal(self.rng, 1, self.H, n, D, dtype=self.dtype)
        return mx.concatenate([rows, free], axis=2)

    def attention(self):
        lengths = {"n_prompt": N_PROMPT, "n_entries": self.n, "n_sink": self.first}
        lengths["choice_stop"] = self.stop
        more = {"positions": self.positions, "means": self.means, "sinks": self.sinks}
        return attend(self.queries, self.prompt, self.answer, self.scale, **lengths, **more)

    def difference(self):
        """Return the largest difference from float64, or infinity if only one of two values is NaN."""
        found = float64(self.attention())[0, :, 0]
        wanted = np.stack([self.wanted(head) for head in range(self.H * self.group)])
        if (np.isnan(found) != np.isnan(wanted)).any():
            return np.inf
        return np.nanmax(np.abs(found - wanted) / np.maximum(1, np.abs(wanted)), initial=0)

    def wanted(self, head):
        h = head // self.group
        keys, values = (
            np.concatenate([float64(x[0, h, :N_PROMPT]), float64(y[0, h, : self.n - N_PROMPT])])
            for x, y in zip(self.prompt, self.answer)
        )
        read = [*range(self.first), *range(self.stop, self.n)]
        if self.positions is not None:
            read = [*np.array(self.positions)[0, h], *read]
        query = float64(self.queries)[0, head, 0] * self.scale
        with np.errstate(invalid="ignore"):
            logits, values = keys[read] @ query, values[read]
        if self.means is not None:
            unread = float64(self.means.unread)[0, h]
            log_mass = float64(self.means.log_mass).reshape(-1)[head]
            seen = (unread > 0) & (log_mass > NO_SINK)
            bias = np.log(np.maximum(unread, 1)) + log_mass
            of_means = 0.75 * (float64(self.means.keys)[0, h] @ query) + bias
            logits = np.concatenate([of_means[seen], logits])
            values = np.concatenate([float64(self.means.values)[0, h][seen], values])
        sink = -np.inf if self.sinks is None else float64(self.sinks)[head]
        return softmax_of_items(logits, values, sink)


# Edge cases of `attend`.
TOKENS = {
    "the token alone": {
        "H": 1, "n_means": 0, "n_chosen": 0, "first": 0, "window": 0, "n_own": 1, "with_sinks": False,
    },
    "no means": {"n_means": 0},
    "no chosen positions": {"n_chosen": 0},
    "one place": {"H": 1, "n_chosen": 1, "with_sinks": False},
    "one whole block": {"n_means": 3, "n_chosen": 0, "first": 0, "window": 0, "n_own": 125},
    "one item more": {"H": 1, "n_means": 3, "n_chosen": 0, "first": 0, "window": 0, "n_own": 126},
    "splits of means alone": {"H": 1, "n_means": 257, "n_chosen": 400},
    "several splits": {"n_chosen": 517, "with_sinks": False},
}  # fmt: skip
