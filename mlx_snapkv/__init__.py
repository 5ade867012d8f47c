"""KV-cache compression for mlx-lm: long prompts, small caches, the same answers."""

from ._version import __version__ as __version__
from .caches import window as cache
from .caches.block import BlockKVCache
from .caches.quantized import (
    QuantizedBlockKVCache,
    QuantizedReselectingSnapKVCache,
    QuantizedSnapKVCache,
)
from .caches.reselecting import ReselectingSnapKVCache
from .caches.window import SnapKVCache
from .chat.conversation import Conversation
from .engine.compress import compress_prompt_cache
from .engine.generate import generate, generate_step, stream_generate
from .engine.prefill import prefill
from .engine.report import CompressionReport
from .errors import SnapKVError
from .models.patch import patch_for_snapkv, unpatch_snapkv
from .policies import H2O, TOVA, KeyDiff, KeyNorm, RandomRows, SnapKV, Stages, StreamingLLM

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
