"""What a cache is now, for later: nothing is copied before it is written over."""

from typing import Any

import mlx.core as mx


def snapshot(attributes: dict[str, Any]) -> dict[str, Any]:
    """A cache's attributes, which later writes into its arrays and lists leave alone."""
    return {name: _kept(value) for name, value in attributes.items()}


def _kept(value: Any) -> Any:
    """An array of its own, which shares the memory until somebody writes into the other."""
    if isinstance(value, mx.array):
        return mx.stop_gradient(value)
    if isinstance(value, (list, tuple)):
        return type(value)(map(_kept, value))
    return value
