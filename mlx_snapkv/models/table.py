"""Which model types of mlx-lm 0.32 can be compressed, and why the others can't.

An allow-list, by the name of the model's file in mlx-lm. What is safe depends on the whole forward pass (how
masks are made, what positions are taken from), so every type was read and is run by the conformance test.
"""

from __future__ import annotations

import mlx.core as mx

from .family import AttentionFamily as Family

_SLIDING = "sliding-window layers stay as they are"
_LINEAR = "linear and state-space layers stay as they are"
_CONVOLUTION = "convolution layers stay as they are"
_PER_HEAD = "keys and values are stored per head"
_TAIL = "qk_rope_head_dim"


def _shares_entries(attentions: list) -> str | None:
    if all(a.has_kv for a in attentions):
        return None
    return (
        "its last layers read the entries of earlier layers, and their queries would have no vote"
    )


def _caps_logits(attentions: list) -> str | None:
    if not any(a.attn_logit_softcapping for a in attentions):
        return None
    return "with attn_logit_softcapping it computes scores of its own instead of calling mlx-lm's attention"


def _uses_sliding_window(layer) -> bool:
    # Models that wrap this one may give plain caches to its sliding-window layers too.
    return getattr(layer, "use_sliding", False)


def _replaces_attention(layer) -> bool:
    return type(layer.self_attn).__name__ == "LinearSubblockReplacement"


def _starts_without_attention(attentions: list) -> str | None:
    if attentions[0] is not None:
        return None
    return (
        "it makes all masks from its first cache, and its first layer has no attention to fill it"
    )


def _has_no_sliding_layer(attentions: list) -> str | None:
    if any(a.is_sliding_window for a in attentions):
        return None
    return "without sliding-window layers it still asks its first layer for a sliding-window mask"


class _Frequencies:
    """The RoPE of families that keep its frequencies, and no object to call."""

    def __init__(self, attention):
        self._frequencies = attention._rope_freqs

    def __call__(self, x: mx.array, offset: int | mx.array) -> mx.array:
        return mx.fast.rope(
            x,
            x.shape[-1],
            traditional=False,
            base=None,
            scale=1.0,
            offset=offset,
            freqs=self._frequencies,
        )


FAMILIES: dict[str, Family] = {
    family.module: family
    for family in (
        Family("Klear", "KlearAttention"),
        Family("afmoe", note=_SLIDING),
        Family("apertus", "ApertusAttention"),
        Family("baichuan_m1", note=f"{_SLIDING}, and so does the convolution of keys and values"),
        Family("bailing_moe", "BailingMoeAttention"),
        Family("bailing_moe_linear", note=_LINEAR),
        Family("bitnet"),
        Family("cohere"),
        Family("cohere2", rotates="use_sliding_window", note=_SLIDING),
        Family("dbrx"),
        Family("deepseek", "DeepseekAttention"),
        Family("deepseek_v2", "DeepseekV2Attention", rotary_tail=_TAIL, note=_PER_HEAD),
        Family("dots1", "Dots1Attention"),
        Family("ernie4_5"),
        Family("ernie4_5_moe"),
        Family("exaone", "AttentionModule"),
        Family("exaone4", rotates="use_rope", note=_SLIDING),
        Family("exaone_moe", rotates="use_rope", note=_SLIDING, refusal=_has_no_sliding_layer),
        Family("falcon_h1", "FalconH1Attention", note=_LINEAR),
        Family("gear", note=f"{_SLIDING}, and so do convolutions", refusal=_caps_logits),
        Family("gemma"),
        Family("gemma3_text", note=_SLIDING),
        Family(
            "gemma4_text",
            note=f"{_SLIDING}; without shared KV layers only",
            refusal=_shares_entries,
        ),
        Family("glm", "GLMAttention"),
        Family("glm4", "Glm4Attention"),
        Family("glm4_moe"),
        Family("gpt2", rope=None, note="learned positions"),
        Family("gpt_bigcode", rope=None, note="learned positions"),
        Family("gpt_neox"),
        Family(
            "gpt_oss",
            "AttentionBlock",
            scale="sm_scale",
            sinks="sinks",
            note=f"attention sinks take part in the votes; {_SLIDING}",
        ),
        Family("gptj", "GPTJAttention", scale="scale_attn"),
        Family("granite"),
        Family("granitemoe", "GraniteMoeAttention"),
        Family("granitemoehybrid", "GraniteMoeHybridAttention", note=_LINEAR),
        Family("helium", "HeliumAttention"),
        Family("hunyuan"),
        Family("hunyuan_v1_dense"),
        Family("internlm2"),
        Family("internlm3"),
        Family("jamba", "JambaAttention", rope=None, note=_LINEAR),
        Family("laguna", note=_SLIDING),
        Family("lfm2", note=_CONVOLUTION),
        Family("lfm2_moe", note=_CONVOLUTION),
        Family("lille-130m", "Lille130mAttention"),
        Family("llama", note=_SLIDING, idle=_uses_sliding_window),
        Family("llama4", rotates="use_rope", note="chunked-attention layers stay as they are"),
        Family("llama4_text", rotates="use_rope"),
        Family("mellum", note=_SLIDING),
        Family("mimo"),
        Family("mimo_v2_flash", sinks="attention_sink_bias", note=_SLIDING),
        Family("minicpm"),
        Family("minicpm3", scale="softmax_scale", rotary_tail=_TAIL, note=_PER_HEAD),
        Family("minimax", "MiniMaxAttention"),
        Family("ministral3", note=_SLIDING, idle=_uses_sliding_window),
        Family("mixtral", "MixtralAttention"),
        Family("muse_glimmer", rotates="use_rope", note=_SLIDING),
        Family("nanbeige", note="every pass of its loop has entries of its own"),
        Family("nanochat", rope=_Frequencies),
        Family("nemotron"),
        Family(
            "nemotron-nas",
            note="layers whose attention is replaced by a linear one stay as they are",
            refusal=_starts_without_attention,
            idle=_replaces_attention,
        ),
        Family("nemotron_h", "NemotronHAttention", rope=None, note=_LINEAR),
        Family("olmo2"),
        Family("olmo3", "Olmo3Attention", note=_SLIDING),
        Family("olmo_hybrid", note=_LINEAR),
        Family("olmoe"),
        Family("openelm"),
        Family("phi", "PhiAttention", scale=None),
        Family("phi3"),
        Family("phimoe"),
        Family("phixtral", "RoPEAttention", scale=None),
        Family("plamo", tiled=True, rope="rotary_emb", note="query heads are tiled over KV heads"),
        Family("plamo3", note=_SLIDING),
        Family("qwen", rope="rotary_emb"),
        Family("qwen2"),
        Family("qwen2_moe"),
        Family("qwen3"),
        Family("qwen3_moe"),
        Family("qwen3_next", "Qwen3NextAttention", note=_LINEAR),
        Family("seed_oss"),
        Family("spark2_5", note=_SLIDING),
        Family("stablelm", scale=None),
        Family("starcoder2"),
        Family("step3p5", "Step3p5Attention", note=_SLIDING),
        Family("talkie", rope=_Frequencies),
        Family("telechat3", "Telechat3Attention"),
        Family("youtu_llm", "YoutuLLMAttention", rotary_tail=_TAIL, note=_PER_HEAD),
    )
}

# Model types whose decoder layers come from another type's file.
_BORROWERS: dict[str, tuple[str, ...]] = {
    "gemma3": ("gemma3_text",),
    "gemma4": ("gemma4_text",),
    "lfm2-vl": ("lfm2",),
    "mistral3": ("llama", "ministral3"),
    "pixtral": ("llama",),
    "prism_hadamard_qwen35": ("qwen3_next",),
    "qwen2_vl": ("qwen2",),
    "qwen3_5": ("qwen3_next",),
    "qwen3_5_moe": ("qwen3_next",),
    "qwen3_vl": ("qwen3",),
    "qwen3_vl_moe": ("qwen3_moe",),
    "smollm3": ("llama",),
    "solar_open": ("glm4_moe",),
}

# Model type -> the attention families that its layers may be of.
SUPPORTED: dict[str, tuple[Family, ...]] = {
    name: tuple(FAMILIES[module] for module in _BORROWERS.get(name, (name,)))
    for name in sorted({*FAMILIES, *_BORROWERS}, key=str.lower)
}

_LATENT = (
    "its entries are latents shared by all heads, and the positional part of the scores is computed "
    "outside mlx-lm's attention (MLA)"
)
_NO_CACHE = "it has no attention, so there is no KV cache to compress"

# Model type -> why it is refused.
REFUSED: dict[str, str] = {
    "afm7": "its last layers read the entries of an earlier layer and take positions from their number",
    "bailing_hybrid": _LATENT,
    "bailing_moe_v3": _LATENT,
    "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT,
    "deepseek_v41": "it keeps windows, groups and indices of its own instead of a KV cache",
    "gemma2": "it caps logits in scores of its own instead of calling mlx-lm's attention",
    "gemma3n": "its last layers read the entries of earlier layers, and their queries would have no vote",
    "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": _LATENT,
    "iquestloopcoder": "its second pass reads the entries of the first, and its queries would have no vote",
    "kimi_k25": _LATENT,
    "kimi_k3": _LATENT,
    "kimi_linear": _LATENT,
    "kimi_vl": _LATENT,
    "longcat_flash": _LATENT,
    "longcat_flash_ngram": _LATENT,
    "mamba": _NO_CACHE,
    "mamba2": _NO_CACHE,
    "minimax_m3_vl": "it picks blocks of entries by their place in the cache, which eviction changes",
    "mistral4": _LATENT,
    "muse_spark": "its attention needs a Metal kernel, without which this version could not be tried on it",
    "olmo": "it computes scores of its own instead of calling mlx-lm's attention",
    "phi3small": "its block-sparse mask is made from the entries' places in the cache, which eviction changes",
    "plamo2": "it calls MLX's attention directly, past mlx-lm's function",
    "recurrent_gemma": "all of its attention layers are sliding windows, which are small already",
    "rwkv7": _NO_CACHE,
}
