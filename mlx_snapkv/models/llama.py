"""LLaMA, and what mlx-lm loads with the same class (Mistral, and others of `model_type` "llama").

Queries are rotated before the attention and keys are stored rotated: nothing is special.
"""

from .family import AttentionFamily

FAMILY = AttentionFamily("llama", "mlx_lm.models.llama", "Attention")
