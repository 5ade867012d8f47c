"""The contract of every layer's cache, and adapters for mlx-lm's own caches."""
