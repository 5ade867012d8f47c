"""A common interface to all layers' caches, adapters for mlx-lm's caches, and functions that find a model's layers."""
