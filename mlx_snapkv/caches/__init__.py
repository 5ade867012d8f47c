"""The interface of every layer's cache, and adapters for mlx-lm's caches."""
