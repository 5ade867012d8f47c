"""One cache of every kind, each filled with the first `START` tokens."""

import mlx.core as mx
import numpy as np
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import ArraysCache, KVCache, QuantizedKVCache, RotatingKVCache

from mlx_snapkv import H2O, TOVA, BlockKVCache, KeyDiff, SnapKVCache
from mlx_snapkv.compress.recording import RecordingKVCache
from mlx_snapkv.entries.quantization import Quantization, pack
from mlx_snapkv.entries.queries import CapturedQueries, Recorder
from mlx_snapkv.entries.quota import Quota
from mlx_snapkv.sparse.stored_cache import StoredKVCache
from mlx_snapkv.sparse.stores.file import FileStore
from mlx_snapkv.sparse.stores.memory import MemoryStore

B, H, D = 1, 2, 32
SCALE = 0.3
HOW = Quantization(8, 32)
START = 20  # tokens in every cache
PINNED = [0, 1, 5, 9, 11]
N_WINDOW = 8


def rows(start, n):
    """Return keys and values `(B, H, n, D)` and queries `(B, 2 * H, n, D)` for `n` tokens from position `start`."""
    made = [np.random.default_rng(t).normal(size=(4 * H, 1, D)) for t in range(start, start + n)]
    made = mx.array(np.concatenate(made, axis=1).astype(np.float32))[None]
    return made[:, :H], made[:, H : 2 * H], made[:, 2 * H :]


def window(quantization=None, n_window=N_WINDOW, pinned=PINNED):
    """Return the compressed cache of a prompt of `START` tokens."""
    keys, values, queries = rows(0, START)
    recent = N_WINDOW if n_window is None else min(n_window, N_WINDOW)
    kept = mx.array([*pinned, *range(START - recent, START)])
    keys, values = keys[:, :, kept], values[:, :, kept]
    keys, values = pack(keys, quantization), pack(values, quantization)
    positions = mx.broadcast_to(mx.array(pinned, mx.uint32), (B, H, len(pinned)))
    cache = SnapKVCache(
        keys, values, positions, offset=START, n_window=n_window, quantization=quantization
    )
    cache.record(CapturedQueries(queries, SCALE))
    return cache


def block(policy, **options):
    return fed(BlockKVCache(policy, Quota(12, 2, 2), 6, **options))


def fed(cache):
    feed(cache, START)
    return cache


def observing():
    cache = StoredKVCache()
    cache.observe(0, 10**6, 30)
    return fed(cache)


def offloaded(store):
    cache = fed(StoredKVCache(store=store))
    cache.offload()
    return cache


EVICTING = {
    "window": window,
    "window that grows": lambda: window(n_window=None),
    "window that grows, of 8 bits": lambda: window(n_window=None, quantization=HOW),
    "window that is not full": lambda: window(n_window=11),
    "window of 8 bits": lambda: window(quantization=HOW),
    "block of 8 bits": lambda: block(KeyDiff(), quantization=HOW),
    "block that votes": lambda: block(TOVA()),
    "block that counts": lambda: block(H2O()),
}
FULL = {
    "recording": lambda: fed(RecordingKVCache(0, 10**6, 30)),
    "stored": observing,
    "offloaded, in a file": lambda: offloaded(FileStore()),
    "offloaded, of 8 bits": lambda: offloaded(MemoryStore(HOW)),
    "mlx-lm's": lambda: fed(KVCache()),
    "mlx-lm's of 8 bits": lambda: fed(QuantizedKVCache(32, 8)),
}
STATES = {
    "mlx-lm's state": lambda: fed(ArraysCache(2)),
    "mlx-lm's sliding window": lambda: fed(RotatingKVCache(8, keep=2)),
}
VOTING = {"block that votes"}
HOLDING = EVICTING | FULL
KINDS = HOLDING | STATES


def feed(cache, n):
    """Add `n` tokens to a cache and attend to it as a model does, creating the mask first. Return the outputs."""
    if isinstance(cache, ArraysCache):
        new = rows(0, n)[0].sum(axis=2, keepdims=True)
        cache[0] = new if cache[0] is None else 0.5 * cache[0] + new
        return cache[0]
    keys, values, queries = rows(cache.offset, n)
    mask = cache.make_mask(n, return_array=False, window_size=None)
    keys, values = cache.update_and_fetch(keys, values)
    if isinstance(cache, Recorder):
        cache.record(CapturedQueries(queries, SCALE))
    return scaled_dot_product_attention(queries, keys, values, cache, SCALE, mask)
