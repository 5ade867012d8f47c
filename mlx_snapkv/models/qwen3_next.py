"""Qwen3-Next; Qwen3.5 and Qwen3.6 checkpoints use the same attention class.

Every `full_attention_interval`-th layer is full attention; the others are linear and keep their
`ArraysCache`. Queries are split from their output gate and normalised before RoPE, which turns only a part
of the head: capturing where the attention is called sees all of it done.
"""

from .family import AttentionFamily

FAMILY = AttentionFamily("qwen3_next", "mlx_lm.models.qwen3_next", "Qwen3NextAttention")
