"""How a prompt's KV entries can be held, measured side by side, and the model that is measured by default."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from ..caches.adapter import full_cache
from ..caches.layers import AttentionLayer, attention_layers, head_sizes
from ..compress.decode_cache import decode_cache
from ..entries.entries import Entries
from ..entries.queries import Queries
from ..entries.quota import Quota
from ..planning.settings import Setting
from ..sparse.cache import SparseKVCache
from ..sparse.full_view import FullView
from ..sparse.options import Sparse
from ..sparse.residual import WEIGHING_QUERIES
from ..sparse.stores import MemoryStore
from ..sparse.token_ranking import TokenRanking

RANDOM = "random LLaMA, float32 (4 layers, hidden size 256, 16 heads, 8 KV heads, head size 64)"
KEEP = 4  # entries that mlx-lm's rotating cache pins at the front
N_TOKEN_IDS = 100  # token ids that every model has


@dataclass(frozen=True)
class Contender:
    """A cache for a prompt's entries."""

    name: str
    entries: int  # per KV head, that a decoding step attends to
    policy: Setting | None = None  # what compresses; None is mlx-lm alone
    bits: int | None = None  # of mlx-lm's quantisation of the full cache
    group_size: int = 64
    rotates: bool = False  # mlx-lm's `--max-kv-size`

    @property
    def is_sparse(self) -> bool:
        """Whether all entries stay, and every token chooses so many anew."""
        return isinstance(self.policy, Sparse)

    def cache(self, layer: AttentionLayer, keys: mx.array, values: mx.array, context: int) -> Any:
        """A layer's cache in the state of decoding after a prompt of `context` tokens.

        Args:
            keys, values: `(B, n_kv_heads, n, head_dim)`: the entries held.
        """
        entries = Entries(keys, values)
        if self.policy is None:
            cache = RotatingKVCache(self.entries, keep=KEEP) if self.rotates else KVCache()
            cache.update_and_fetch(keys, values)
            return cache if self.bits is None else cache.to_quantized(self.group_size, self.bits)
        if isinstance(self.policy, Sparse):
            quota = self.policy.quota(context)
            everything = FullView([MemoryStore(cache=full_cache(entries))], layer)
            everything.index = everything.make_index(None)
            ranking = TokenRanking(everything, quota)
            if self.policy.residual is not None:
                ranking.weigh_residual(_last_queries(keys))
            return SparseKVCache(ranking)
        policy = self.policy.decode_policy
        return decode_cache(layer, entries, context, policy, policy.quota(context))


def _last_queries(keys: mx.array) -> Queries:
    """As after a prompt, whose last queries weigh what a token does not read."""
    heads, n = mx.random.normal((*keys.shape[:2], WEIGHING_QUERIES, keys.shape[3])), keys.shape[2]
    return Queries(heads, range(n - WEIGHING_QUERIES, n), keys.shape[3] ** -0.5)


def make_random_model() -> llama.Model:
    """The model that is measured when none is given, the same in every run: attention dominates, even on a CPU."""
    mx.random.seed(0)
    args = llama.ModelArgs("llama", 256, 4, 512, 16, 1e-5, 1024, head_dim=64, num_key_value_heads=8)
    model = llama.Model(args)
    mx.eval(model.parameters())
    return model


def random_prompt(n_tokens: int) -> mx.array:
    prompt = mx.random.randint(1, N_TOKEN_IDS, (n_tokens,))
    mx.eval(prompt)
    return prompt


def compressed(context: int, policies: list[Setting]) -> list[Contender]:
    """Return the settings that would do something to a prompt of `context` tokens."""
    return [
        Contender(str(setting), decode_quota(setting, context).entries, setting)
        for setting in policies
        if _min_ctx(setting) <= context and not setting.fits(context)
    ]


def decode_quota(setting: Setting, n_prompt: int) -> Quota:
    """Return the entries of a prompt that an answer token reads."""
    chooses = setting if isinstance(setting, Sparse) else setting.decode_policy
    return chooses.quota(n_prompt)


def _min_ctx(setting: Setting) -> int:
    return 0 if isinstance(setting, Sparse) else setting.policy.min_ctx


def contenders(model, context: int, policies: list[Setting]) -> list[Contender]:
    """What decodes after `context` tokens: the full cache, mlx-lm's options, and the policies."""
    ours = compressed(context, policies)
    found = [Contender("full cache", context)]
    if ours:
        fewest = min(contender.entries for contender in ours)
        found.append(Contender(f"--max-kv-size {fewest}", fewest, rotates=True))
    sizes = head_sizes(model, attention_layers(model, make_prompt_cache(model)))
    group = next((g for g in (64, 32) if all(size % g == 0 for size in sizes)), None)
    # MLX has no products with batches of quantised entries on CUDA.
    for bits in (8, 4) if group is not None and not mx.cuda.is_available() else ():
        found.append(Contender(f"--kv-bits {bits}", context, bits=bits, group_size=group or 0))
    return found + ours


def decoding_cache(model, contender: Contender, context: int) -> list[Any]:
    """A prompt cache as it is after a prompt of `context` tokens, its full layers filled with random entries.

    Only shapes matter for speed. The other layers have read a few tokens.
    """
    prompt_cache = make_prompt_cache(model)
    mx.eval(model(mx.zeros((1, 8), mx.int32), cache=prompt_cache))
    n = contender.entries if contender.policy and not contender.is_sparse else context
    for layer in attention_layers(model, prompt_cache):
        read = layer.cache_in(prompt_cache).keys_and_values()
        keys, values = (
            mx.random.normal((*x.shape[:2], n, x.shape[3])).astype(x.dtype) for x in read
        )
        layer.put(prompt_cache, contender.cache(layer, keys, values, context))
    mx.eval([cache.state for cache in prompt_cache])
    return prompt_cache
