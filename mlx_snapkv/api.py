"""The public names of `mlx_snapkv`."""

from .batch.generate import batch_generate
from .batch.generator import CompressedBatchGenerator
from .caches import BlockKVCache, SnapKVCache
from .chat.conversation import Conversation
from .engine.compress import compress_prompt_cache
from .engine.generate import generate, generate_step, stream_generate
from .engine.prefill import prefill
from .engine.report import CompressionReport
from .errors import SnapKVError
from .inspecting.inspection import Inspection, inspect_prompt
from .models.patch import patch_for_snapkv, unpatch_snapkv
from .planning.plan import MemoryPlan, plan_memory
from .policies import (
    H2O,
    TOVA,
    ExpectedAttention,
    KeyDiff,
    KeyNorm,
    KVzip,
    LagKV,
    RandomRows,
    ScissorHands,
    SnapKV,
    Stages,
    StreamingLLM,
)

__all__ = [
    "H2O",
    "TOVA",
    "BlockKVCache",
    "CompressedBatchGenerator",
    "CompressionReport",
    "Conversation",
    "ExpectedAttention",
    "Inspection",
    "KVzip",
    "KeyDiff",
    "KeyNorm",
    "LagKV",
    "MemoryPlan",
    "RandomRows",
    "ScissorHands",
    "SnapKV",
    "SnapKVCache",
    "SnapKVError",
    "Stages",
    "StreamingLLM",
    "batch_generate",
    "compress_prompt_cache",
    "generate",
    "generate_step",
    "inspect_prompt",
    "patch_for_snapkv",
    "plan_memory",
    "prefill",
    "stream_generate",
    "unpatch_snapkv",
]
