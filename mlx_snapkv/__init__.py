"""KV-cache compression for mlx-lm: long prompts, small caches, the same answers."""

from . import cache
from .block_cache import BlockKVCache
from .cache import SnapKVCache
from .capture import patch_for_snapkv, unpatch_snapkv
from .compress import compress_prompt_cache
from .conversation import Conversation
from .errors import SnapKVError
from .generate import generate, generate_step, stream_generate
from .policies import H2O, TOVA, KeyDiff, KeyNorm, RandomRows, SnapKV, Stages, StreamingLLM
from .prefill import prefill
from .quantized_cache import (
    QuantizedBlockKVCache,
    QuantizedReselectingSnapKVCache,
    QuantizedSnapKVCache,
)
from .report import CompressionReport
from .reselecting_cache import ReselectingSnapKVCache

__version__ = "0.1.0"

__all__ = [
    "H2O",
    "TOVA",
    "BlockKVCache",
    "CompressionReport",
    "Conversation",
    "KeyDiff",
    "KeyNorm",
    "QuantizedBlockKVCache",
    "QuantizedReselectingSnapKVCache",
    "QuantizedSnapKVCache",
    "RandomRows",
    "ReselectingSnapKVCache",
    "SnapKV",
    "SnapKVCache",
    "SnapKVError",
    "Stages",
    "StreamingLLM",
    "compress_prompt_cache",
    "generate",
    "generate_step",
    "patch_for_snapkv",
    "prefill",
    "stream_generate",
    "unpatch_snapkv",
]

cache.register(SnapKVCache)
cache.register(ReselectingSnapKVCache)
cache.register(BlockKVCache)
cache.register(QuantizedSnapKVCache)
cache.register(QuantizedReselectingSnapKVCache)
cache.register(QuantizedBlockKVCache)
