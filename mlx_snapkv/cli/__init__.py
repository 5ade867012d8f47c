"""The `mlx-snapkv` command."""
