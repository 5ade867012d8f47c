"""Find a model's full-attention layers and their caches in a prompt cache."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, make_prompt_cache

from ..entries.quantization import BITS, Quantization, fitting_group_sizes
from ..errors import Option, OptionError, UnsupportedModelError
from ..models import cache_owners, type_of
from ..models import rope as rotations
from ..models.distributed import PIPELINE, split_of
from ..models.family import AttentionFamily
from .adapter import has_all_entries, layer_cache
from .contract import LayerCache


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """A full-attention layer, and where to find its cache in a prompt cache."""

    index: int  # index of the layer's cache in the prompt cache
    member: int | None  # index of the cache inside a `CacheList`, or None
    attention: Any  # the attention module
    family: AttentionFamily  # describes the module's class
    # Other attention modules that read this layer's entries. They belong to later layers or, if the model loops over
    # its layers, to later passes.
    borrowers: tuple[Any, ...] = ()
    number: int = 0  # index among this process's full-attention layers

    def cache_in(self, prompt_cache: list) -> Any:
        """Return the layer's cache from a prompt cache."""
        cache = prompt_cache[self.index]
        return cache if self.member is None else cache[self.member]

    def layer_cache_in(self, prompt_cache: list) -> LayerCache:
        """Return the layer's cache from a prompt cache, as a `LayerCache`."""
        return layer_cache(self.cache_in(prompt_cache))

    def put(self, prompt_cache: list, cache: Any) -> None:
        """Replace the layer's cache. If it is in a `CacheList`, replace the list too."""
        if self.member is None:
            prompt_cache[self.index] = cache
            return
        members = list(prompt_cache[self.index].caches)
        members[self.member] = cache
        prompt_cache[self.index] = CacheList(*members)

    @property
    def latent(self) -> bool:
        """Return whether the layer's entries are latents and positional keys (MLA); see `Entries`."""
        return self.family.latent

    @property
    def logit_cap(self) -> float | None:
        """Return the soft cap on the attention logits, or None."""
        return getattr(self.attention, self.family.logit_cap) if self.family.logit_cap else None

    @property
    def readers(self) -> tuple[Any, ...]:
        """Return the attention modules that read the layer's entries, starting with its own."""
        return self.attention, *self.borrowers

    @property
    def rope(self) -> Any | None:
        """Return the layer's RoPE, a callable `rope(x, offset)`, or None."""
        return self.family.rope_of(self.attention)

    def undo_rope(self, queries: mx.array, offset: int) -> mx.array:
        """Undo RoPE for queries `(B, n_heads, n, head_dim)`, and return them as float32.

        `offset` is the position of the first query.
        """
        rope = self.rope

        def undo(rotary_part: mx.array) -> mx.array:
            return rotations.undo_rope(rope, rotary_part, offset)

        return self.family.map_rotary(self.attention, queries, undo)

    def mean_rotation(self, head_dim: int, start: int, n: int) -> mx.array:
        """Return the mean rotation matrix of positions `[start, start + n)`, float32 `(head_dim, head_dim)`."""
        rope = self.rope

        def rotate(rotary_part: mx.array) -> mx.array:
            rotary_dim = rotary_part.shape[3]
            return rotary_part @ rotations.mean_rotation(rope, rotary_dim, start, n).T

        # The matrix's columns are the images of the unit vectors.
        unit_vectors = mx.eye(head_dim)[None, None]
        images = self.family.map_rotary(self.attention, unit_vectors, rotate)
        return images[0, 0].T

    def group_heads(self, heads: mx.array, n_kv_heads: int) -> mx.array:
        """Reorder `heads` `(B, n_heads, ...)` of all `readers`, so that the heads of each GQA group are adjacent."""
        groups_by_reader: list[mx.array] = []  # each has shape `(B, n_kv_heads, group size, ...)`
        for heads_of_reader in mx.split(heads, len(self.readers), axis=1):
            grouped_heads = self.family.group_heads(heads_of_reader, n_kv_heads)
            groups_by_reader.append(mx.unflatten(grouped_heads, 1, (n_kv_heads, -1)))
        return mx.concatenate(groups_by_reader, axis=2).flatten(1, 2)

    def __deepcopy__(self, memo: dict) -> AttentionLayer:
        """Return the layer itself, because copied caches belong to the same model."""
        return self


def attention_layers(model, prompt_cache: list) -> list[AttentionLayer]:
    """Return the model's full-attention layers. Linear and sliding-window layers are left out.

    Raises: UnsupportedModelError: the model can't be compressed or has no full-attention layers, or the prompt cache
        was made for another model.
    """
    owners = cache_owners(model)
    # Linear layers use an `ArraysCache`, which has no entries.
    slots_with_entries = [
        slot for slot in slots(prompt_cache) if not isinstance(slot.cache, ArraysCache)
    ]
    # A model that loops over its layers has a set of caches for each pass.
    is_whole_number_of_passes = len(slots_with_entries) % len(owners) == 0
    if not is_whole_number_of_passes:
        raise UnsupportedModelError(
            f"{len(slots_with_entries)} caches with entries for {len(owners)} attention layers: "
            "give a prompt cache that mlx-lm's make_prompt_cache made for this model"
        )
    layers: list[AttentionLayer] = []
    for slot, owner in zip(slots_with_entries, itertools.cycle(owners)):
        is_compressible = owner.attention is not None and has_all_entries(slot.cache)
        if not is_compressible:
            continue
        layers.append(
            AttentionLayer(
                index=slot.cache_index,
                member=slot.member,
                attention=owner.attention,
                family=owner.family,
                borrowers=tuple(owner.borrowers),
                number=len(layers),
            )
        )
    if not layers:
        remedy = " on this Mac: start fewer" if split_of(model) == PIPELINE else ""
        raise UnsupportedModelError(
            f"model type {type_of(model)!r} has no full-attention layer with a plain KV cache to compress{remedy}"
        )
    return layers


def sparse_layers(layers: list[AttentionLayer]) -> list[AttentionLayer]:
    """Return the layers that use sparse attention.

    Layers that lend their entries to other layers are left out. The borrowers receive the entries as arrays, so the
    lender's cache must return all of them.
    """
    return [layer for layer in layers if not layer.borrowers]


def token_caches(model) -> list:
    """Return the caches of a model that has read one token.

    Nothing is evaluated, so use only the shapes and dtypes of the arrays.
    """
    caches = make_prompt_cache(model)
    model(mx.zeros((1, 1), mx.int32), cache=caches)
    return caches


def first_sparse_position(prompt_cache: list) -> int | None:
    """Return the position of the first entry computed with sparse attention, or None."""
    positions = (cache.sparse_from for cache in layer_caches(prompt_cache))
    return min((position for position in positions if position is not None), default=None)


def head_sizes(model, layers: list[AttentionLayer]) -> set[int]:
    """Return the head sizes of the layers' keys and values."""
    prompt_cache = token_caches(model)
    sizes: set[int] = set()
    for layer in layers:
        keys, values = layer.cache_in(prompt_cache).keys_and_values()
        sizes |= {keys.shape[3], values.shape[3]}
    return sizes


def require_quantised_attention(layers: list[AttentionLayer], remedy: str, option: Option) -> None:
    """Check that the model's attention can read quantised entries.

    Args:
        layers: the model's full-attention layers.
        remedy: end of the error message, with `{}` as a placeholder for `option`.
        option: the option that the remedy names.

    Raises: UnsupportedModelError: mlx-lm's forward pass for the model only reads plain entries.
    """
    for layer in layers:
        reason = layer.family.why_unquantizable(list(layer.readers))
        if reason:
            raise UnsupportedModelError("{}: " + remedy, reason, option)


def require_quantizable(model, layers: list[AttentionLayer], quantization: Quantization) -> None:
    """Check that the model's entries can be quantised. Call this before reading the prompt.

    Raises:
        SnapKVError: the number of bits or the group size is not supported.
        UnsupportedModelError: mlx-lm's quantised attention does not support the model.
    """
    if quantization.bits not in BITS:
        raise OptionError("kv_bits", ", ".join(map(str, BITS)), quantization.bits)
    if any(layer.family.sinks for layer in layers):
        raise UnsupportedModelError(
            "mlx-lm's quantised attention has no attention sinks, which this model needs: drop {}",
            Option("kv_bits"),
        )
    require_quantised_attention(layers, "drop {}", Option("kv_bits"))
    sizes = head_sizes(model, layers)
    group_sizes = fitting_group_sizes(sizes, Option("kv_bits"))
    if quantization.group_size not in group_sizes:
        allowed = f"one of {group_sizes} for heads of size {sorted(sizes)}"
        raise OptionError("kv_group_size", allowed, quantization.group_size)


class Slot(NamedTuple):
    """A cache and its place in a prompt cache."""

    cache_index: int  # index in the prompt cache
    member: int | None  # index inside a `CacheList`, or None
    cache: Any


def slots(prompt_cache: list) -> list[Slot]:
    """Return every cache in a prompt cache with its place, including those inside a `CacheList`."""
    all_slots: list[Slot] = []
    for index, cache in enumerate(prompt_cache):
        if isinstance(cache, CacheList):
            for member, member_cache in enumerate(cache.caches):
                all_slots.append(Slot(index, member, member_cache))
        else:
            all_slots.append(Slot(index, None, cache))
    return all_slots


def all_caches(prompt_cache: list) -> list:
    """Return all caches in a prompt cache, including those inside a `CacheList`."""
    return [slot.cache for slot in slots(prompt_cache)]


def map_caches(function: Callable[[Any], Any], prompt_cache: list) -> list:
    """Apply `function` to each cache in a prompt cache, including those inside a `CacheList`."""
    mapped_caches: list[Any] = []
    for cache in prompt_cache:
        if isinstance(cache, CacheList):
            mapped_caches.append(CacheList(*map(function, cache.caches)))
        else:
            mapped_caches.append(function(cache))
    return mapped_caches


def layer_caches(prompt_cache: list) -> list[LayerCache]:
    """Return all caches in a prompt cache as `LayerCache`s."""
    return [layer_cache(cache) for cache in all_caches(prompt_cache)]


def n_tokens(prompt_cache: list) -> int:
    """Return the number of tokens read into a prompt cache, or 0 if none of its caches counts tokens."""
    return max((cache.offset for cache in layer_caches(prompt_cache)), default=0)


def kv_dtype(cache: LayerCache) -> str:
    """Return the dtype of a layer's entries, such as "float16" or "8 bits"."""
    quantization = cache.quantization
    if quantization is None and cache.store is not None:
        quantization = cache.store.quantization
    if quantization is not None:
        return f"{quantization.bits} bits"
    keys, _ = cache.sample_entries
    return str(keys.dtype).removeprefix("mlx.core.")


def kv_bytes(prompt_cache: list) -> int:
    """Return the size in bytes of keys, values and indexes in memory."""
    return sum(cache.kv_nbytes for cache in layer_caches(prompt_cache))


def memory_bytes(prompt_cache: list) -> int:
    """Return the size in bytes of all caches in memory, including indexes, linear states and sliding windows."""
    # The larger of a cache's two sizes is complete, because it includes everything that the smaller one counts:
    # `kv_nbytes` is 0 for linear states and sliding windows, and `nbytes` leaves out the index of a `StoredKVCache`.
    return sum(
        max(cache.nbytes, layer_cache(cache).kv_nbytes) for cache in all_caches(prompt_cache)
    )


def file_bytes(prompt_cache: list) -> int:
    """Return the size in bytes of the keys, values and indexes that are stored in files."""
    return sum(cache.file_nbytes for cache in layer_caches(prompt_cache))


def copies_sharing_entries(prompt_cache: list, layers: list[AttentionLayer]) -> list:
    """Copy a prompt cache, but share the caches of the full-attention `layers` with the original."""
    shared_caches = [layer.cache_in(prompt_cache) for layer in layers]
    # deepcopy does not copy objects that it finds in `memo`.
    memo = {id(cache): cache for cache in shared_caches}
    return [copy.deepcopy(cache, memo) for cache in prompt_cache]


def is_compressed(prompt_cache: list) -> bool:
    """Return whether any layer's cache is compressed; see `LayerCache.is_compressed`."""
    return any(cache.is_compressed for cache in layer_caches(prompt_cache))
