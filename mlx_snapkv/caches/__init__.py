"""The interface of every layer's cache, adapters for mlx-lm's caches, and a model's layers."""
