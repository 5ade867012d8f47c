"""The contract of every layer's cache, and mlx-lm's own caches behind it."""
