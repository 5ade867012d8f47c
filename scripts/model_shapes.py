"""Models in the shapes of well-known ones, with random weights that are not computed yet."""

from typing import Any

from mlx_lm.models import llama, qwen3_moe


def llama_8b() -> Any:
    """Return a model with the shape of Llama 3.1 8B."""
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=4096,
        num_hidden_layers=32,
        intermediate_size=14_336,
        num_attention_heads=32,
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        vocab_size=128_256,
        rope_theta=500_000.0,
        max_position_embeddings=131_072,
        tie_word_embeddings=False,
    )
    return llama.Model(args)


def qwen3_30b_a3b() -> Any:
    """Return a model with the shape of Qwen3 30B-A3B."""
    args = qwen3_moe.ModelArgs(
        model_type="qwen3_moe",
        hidden_size=2048,
        num_hidden_layers=48,
        intermediate_size=6144,
        num_attention_heads=32,
        num_experts=128,
        num_experts_per_tok=8,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        moe_intermediate_size=768,
        rms_norm_eps=1e-6,
        vocab_size=151_936,
        num_key_value_heads=4,
        head_dim=128,
        rope_theta=1e6,
        tie_word_embeddings=False,
        max_position_embeddings=262_144,
        norm_topk_prob=True,
    )
    return qwen3_moe.Model(args)
