"""Where entries live."""

from mlx_lm.models import cache as mlx_cache

from .block import BlockKVCache
from .recording import RecordingKVCache
from .window import SnapKVCache

# mlx-lm's `load_prompt_cache` looks classes up by name.
for _kind in (SnapKVCache, BlockKVCache, RecordingKVCache):
    setattr(mlx_cache, _kind.__name__, _kind)
