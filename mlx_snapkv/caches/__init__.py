"""The interface that every layer's cache implements, and adapters for mlx-lm's caches."""
