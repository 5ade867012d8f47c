"""A layer's RoPE, of which only the call is known: undone, averaged, and applied once more; the trained length."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

Rope = Callable[..., mx.array]

AT_ONCE = 1 << 15  # entries: CUDA takes at most twice as many sequences in one call
PROBE = "_mlx_snapkv_probe"


@dataclass(frozen=True)
class Probe:
    """What a RoPE object does to the unit vectors, kept with the object; `(head_dim,)` each."""

    signs: mx.array  # float32, -1 for the first dimension of a pair that turns together
    power: mx.array  # float32, the squared amplitude
    partners: mx.array  # the dimension that it turns with; one that never turns is its own partner


def undo_rope(rope: Rope | None, x: mx.array, offset: int | mx.array) -> mx.array:
    """The input of `rope(x, offset)`, float32, from its result `x` `(B, n_heads, n, head_dim)`; None turned nothing.

    A rotation by an angle is undone by the same rotation between two reflections, so the object itself is called again,
    whatever its frequencies. A first call finds which dimensions it turns together, and what it multiplies them by.
    """
    x = x.astype(mx.float32)
    if rope is None or not x.size:
        return x
    probe = _probe(rope, x.shape[-1])
    return probe.signs * rope(probe.signs * x, offset) / probe.power


def mean_rotation(rope: Rope | None, head_dim: int, start: int, n: int) -> mx.array:
    """The mean, float32 `(head_dim, head_dim)`, of what `rope` multiplies column vectors by at `[start, start + n)`."""
    if rope is None:
        return mx.eye(head_dim)
    probe = _probe(rope, head_dim)
    # Two vectors tell all of it: the first of each pair in one, the second in the other.
    # Not broadcast: MLX's CUDA kernel would write all positions over each other.
    first = (probe.signs < 0).astype(mx.float32)
    vectors = mx.broadcast_to(mx.stack([first, 1 - first])[:, None, None], (2, 1, n, head_dim))
    of_first, of_second = rope(mx.contiguous(vectors), start).mean(axis=2).reshape(2, head_dim, 1)
    is_first = first[:, None] > 0
    other = (probe.partners[:, None] == mx.arange(head_dim)).astype(mx.float32)
    from_own = mx.where(is_first, of_first, of_second)
    from_other = mx.where(is_first, of_second, of_first)
    return from_own * mx.eye(head_dim) + from_other * other


def turn(rope: Rope, x: mx.array, steps: mx.array) -> mx.array:
    """`x` `(B, n_heads, n, head_dim)`, which `rope` has turned, turned on by `steps` `(B, n_heads, n)`; it `composes`.

    Same shape and dtype; what is turned by 0 steps is as it was, bit for bit.
    """
    D = x.shape[-1]
    if not x.size:  # which CUDA takes no offsets for
        return x
    # An offset for all of a sequence would turn its second by one step more, and so on: each is one of its own.
    alone, by = x.astype(mx.float32).reshape(-1, 1, 1, D), steps.astype(mx.int32).reshape(-1)
    parts = (slice(i, i + AT_ONCE) for i in range(0, len(by), AT_ONCE))
    turned = mx.concatenate([rope(alone[part], by[part]) for part in parts])
    turned = turned / mx.sqrt(_probe(rope, D).power)  # what it multiplies the dimensions by
    return mx.where((steps > 0)[..., None], turned.reshape(x.shape).astype(x.dtype), x)


def composes(rope: Rope, head_dim: int, length: int) -> bool:
    """Whether turning twice is turning once by the sum, at positions beyond `length`."""
    x = mx.ones((1, 1, 1, head_dim))
    first, then = 2 * length, max(1, length // 2)
    try:
        twice = turn(rope, rope(x, first), mx.full((1, 1, 1), then))
        at_once = rope(x, first + then)
        error = mx.square(twice - at_once).mean() / mx.square(at_once).mean()
        return bool((error < 0.01).item())
    except (TypeError, ValueError):  # it takes no offset for each sequence
        return False


def _probe(rope: Rope, head_dim: int) -> Probe:
    probes = vars(rope).setdefault(PROBE, {})
    if head_dim not in probes:
        # At position 1 no angle is a multiple of pi but that of a dimension which never turns.
        turned = rope(mx.eye(head_dim)[:, None, None], 1).reshape(head_dim, head_dim)
        dims = mx.arange(head_dim)
        with_other = (turned != 0) & (dims[None] != dims[:, None])
        partners = mx.where(mx.any(with_other, axis=1), mx.argmax(with_other, axis=1), dims)
        signs = mx.where(partners > dims, -1.0, 1.0)
        probes[head_dim] = Probe(signs, (turned * turned).sum(axis=1), partners)
        mx.async_eval(signs, partners, probes[head_dim].power)  # no graph of this thread's is kept
    return probes[head_dim]


def trained_length(model) -> int | None:
    """The `max_position_embeddings` of a model's configuration, or what a scaled RoPE extends them to; None if mlx-lm's
    arguments of the family leave them out."""
    lengths = _lengths(model)
    return lengths and lengths[0]


def longest_trained_length(model) -> int | None:
    """The same if a linear factor is still to multiply `max_position_embeddings`.

    Of published configurations some have multiplied them already, some have not, and nothing in them says which.
    """
    lengths = _lengths(model)
    return lengths and lengths[1]


def _lengths(model) -> tuple[int, int] | None:
    args = getattr(model, "args", None)
    for config in (args, _of(args, "text_config")):
        length = _of(config, "max_position_embeddings")
        if isinstance(length, int) and length > 0:
            readings = [_extended(length, scaling) for scaling in _scalings(config)]
            shorter, longer = zip((length, length), *readings)
            return max(shorter), max(longer)
    return None


def _scalings(config: Any) -> list[Any]:
    """What is said of the scaling, by mlx-lm's name or that of transformers 5, which may have it by layer type."""
    said = _of(config, "rope_scaling") or _of(config, "rope_parameters")
    by_type = (
        [x for x in said.values() if isinstance(x, Mapping)] if isinstance(said, Mapping) else []
    )
    return by_type or [said]


def _extended(length: int, scaling: Any) -> tuple[int, int]:
    """What `length` becomes, and what it may become."""
    original, factor = _of(scaling, "original_max_position_embeddings"), _of(scaling, "factor")
    kind = _of(scaling, "rope_type") or _of(scaling, "type")
    if (
        not factor or kind == "llama3"
    ):  # whose factor is of wavelengths, and whose length is told as it is
        return length, length
    if original:
        return int(original * factor), int(original * factor)
    return length, int(length * factor) if kind == "linear" else length


def _of(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
