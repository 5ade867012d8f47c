"""Where entries live."""

from mlx_lm.models import cache as mlx_cache

from .block import BlockKVCache
from .out_of_core import OutOfCoreKVCache
from .window import SnapKVCache

# mlx-lm's `load_prompt_cache` looks classes up by name.
for _kind in (SnapKVCache, BlockKVCache, OutOfCoreKVCache):
    setattr(mlx_cache, _kind.__name__, _kind)
