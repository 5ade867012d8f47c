"""Build the caches that `bench` compares, and the model that it uses by default."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from ..caches.adapter import full_cache
from ..caches.layers import AttentionLayer, attention_layers, head_sizes
from ..compress.decode_cache import make_decode_cache
from ..compress.options import Compress
from ..entries.entries import Entries
from ..entries.quantization import group_sizes_dividing
from ..entries.queries import Queries
from ..entries.quota import Quota
from ..models.counts import n_query_heads
from ..planning.prompt_plan import reason_to_leave
from ..planning.settings import Setting
from ..sparse.cache import SparseKVCache
from ..sparse.full_view import FullView
from ..sparse.options import Sparse
from ..sparse.residual import FITTING_QUERIES
from ..sparse.stores import MemoryStore
from ..sparse.token_ranking import TokenRanking
from .methods import FULL_CACHE

RANDOM = "random LLaMA, float32 (4 layers, hidden size 256, 16 heads, 8 KV heads, head size 64)"
KEEP = 4  # number of initial entries that mlx-lm's rotating cache keeps
N_TOKEN_IDS = 100  # every model has at least this many token ids


@dataclass(frozen=True)
class Contender:
    """A kind of cache to measure.

    Attributes:
        entries: number of entries that a decoding step reads per KV head.
        policy: the setting, or None for mlx-lm's own caches.
        bits, group_size: mlx-lm's quantisation settings. `bits` is None without quantisation.
        rotates: whether the cache is mlx-lm's rotating cache (`--max-kv-size`).
    """

    name: str
    entries: int
    policy: Setting | None = None
    bits: int | None = None
    group_size: int = 64
    rotates: bool = False

    def make_cache(
        self, layer: AttentionLayer, keys: mx.array, values: mx.array, context: int
    ) -> Any:
        """Return one layer's cache after a prompt of `context` tokens.

        Args:
            layer: layer that the cache belongs to.
            keys: keys of the cached entries, `(B, n_kv_heads, n, head_dim)`.
            values: values of the same entries, same shape.
            context: prompt length in tokens. If `n` is smaller, the other entries were evicted.
        """
        if self.policy is None:
            return self._mlx_lm_cache(keys, values)
        entries = Entries(keys, values)
        if isinstance(self.policy, Sparse):
            return make_sparse_cache(self.policy, layer, entries, context)
        decode_policy = self.policy.decode_policy
        quota = decode_policy.quota(context)
        return make_decode_cache(layer, entries, context, decode_policy, quota)

    def _mlx_lm_cache(self, keys: mx.array, values: mx.array) -> Any:
        """Return one of mlx-lm's own caches with these entries."""
        cache = RotatingKVCache(self.entries, keep=KEEP) if self.rotates else KVCache()
        cache.update_and_fetch(keys, values)
        if self.bits is None:
            return cache
        return cache.to_quantized(self.group_size, self.bits)


def make_sparse_cache(sparse: Sparse, layer: AttentionLayer, entries: Entries, context: int) -> Any:
    """Return one layer's sparse cache over all `entries`.

    A layer that shares its entries with other layers is not sparse, and gets a full cache.
    """
    if layer.borrowers:
        return full_cache(entries)
    view = FullView([MemoryStore(cache=full_cache(entries))], layer)
    view.index = view.make_index(None)
    ranking = TokenRanking(view, sparse.quota(context))
    if sparse.residual is not None:
        ranking.fit_residual(_random_last_queries(layer, entries.keys))
    return SparseKVCache(ranking)


def _random_last_queries(layer: AttentionLayer, keys: mx.array) -> Queries:
    """Return random queries for a prompt's last tokens. The residual is fitted to them (sparse/residual.py)."""
    n_tokens, head_dim = keys.shape[2:]
    queries = random_like(keys, FITTING_QUERIES, n_query_heads(layer.attention))
    last_positions = range(n_tokens - FITTING_QUERIES, n_tokens)
    return Queries(queries, last_positions, scale=head_dim**-0.5)


def make_random_model() -> llama.Model:
    """Create `bench`'s default model. Its weights are random, but the same each time.

    The model is small, so that attention takes most of the time, even on a CPU.
    """
    mx.random.seed(0)
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=256,
        num_hidden_layers=4,
        intermediate_size=512,
        num_attention_heads=16,
        rms_norm_eps=1e-5,
        vocab_size=1024,
        head_dim=64,
        num_key_value_heads=8,
    )
    model = llama.Model(args)
    mx.eval(model.parameters())
    return model


def random_prompt(n_tokens: int) -> mx.array:
    """Return random token ids `(n_tokens,)`."""
    prompt = mx.random.randint(1, N_TOKEN_IDS, (n_tokens,))
    mx.eval(prompt)
    return prompt


def full_and_policies(context: int, policies: list[Setting]) -> list[Contender]:
    """Return the full cache, and a contender for each policy that would compress a prompt of `context` tokens."""
    policy_contenders = [
        Contender(str(setting), decode_quota(setting, context).entries, setting)
        for setting in policies
        if reason_to_leave(setting, context, prompt_cache=None) is None
    ]
    return [Contender(FULL_CACHE, context), *policy_contenders]


def decode_quota(setting: Setting, n_prompt: int) -> Quota:
    """Return the quota of prompt entries that an answer token reads.

    Raises: SnapKVError: the budget is less than one entry, or leaves no entry for a policy's sliding window.
    """
    policy = setting if isinstance(setting, Sparse) else setting.decode_policy
    return policy.quota(n_prompt)


def contenders(model, context: int, policies: list[Setting]) -> list[Contender]:
    """Return the contenders at a context length: the full cache, mlx-lm's options and the policies."""
    full, *our_contenders = full_and_policies(context, policies)
    mlx_lm_contenders = [full]
    if our_contenders:
        fewest_entries = min(contender.entries for contender in our_contenders)
        name = f"--max-kv-size {fewest_entries}"
        mlx_lm_contenders.append(Contender(name, fewest_entries, rotates=True))
    layers = attention_layers(model, make_prompt_cache(model))
    group_sizes = group_sizes_dividing(head_sizes(model, layers))
    # MLX has no batched matrix multiplication with quantised entries on CUDA.
    if group_sizes and not mx.cuda.is_available():
        group_size = min(64, max(group_sizes))  # 64 is mlx-lm's default
        for bits in (8, 4):
            name = f"--kv-bits {bits}"
            quantized_cache = Contender(name, context, bits=bits, group_size=group_size)
            mlx_lm_contenders.append(quantized_cache)
    return mlx_lm_contenders + our_contenders


def decoding_cache(model, contender: Contender, context: int) -> list[Any]:
    """Return a contender's prompt cache after a prompt of `context` tokens.

    Full-attention layers get random entries, because speed depends only on shapes. The caches of other layers have read
    a few tokens.
    """
    prompt_cache = make_prompt_cache(model)
    mx.eval(model(mx.zeros((1, 8), mx.int32), cache=prompt_cache))
    evicts = isinstance(contender.policy, Compress)
    n_entries = contender.entries if evicts else context
    for layer in attention_layers(model, prompt_cache):
        few_keys, few_values = layer.cache_in(prompt_cache).keys_and_values()
        keys = random_like(few_keys, n_entries)
        values = random_like(few_values, n_entries)
        layer.put(prompt_cache, contender.make_cache(layer, keys, values, context))
    mx.eval([cache.state for cache in prompt_cache])
    return prompt_cache


def random_like(array: mx.array, n_tokens: int, n_heads: int | None = None) -> mx.array:
    """Return random keys, values or queries for `n_tokens` tokens, in `array`'s dtype.

    Args:
        array: keys or values `(B, n_kv_heads, T, head_dim)`.
        n_tokens: number of tokens.
        n_heads: number of heads. Defaults to `n_kv_heads`.
    """
    B, n_kv_heads, _, head_dim = array.shape
    shape = B, n_heads or n_kv_heads, n_tokens, head_dim
    return mx.random.normal(shape).astype(array.dtype)
