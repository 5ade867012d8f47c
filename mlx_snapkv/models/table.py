"""The mlx-lm 0.32 model types that can be compressed, and why the others can't.

This is an allow-list, keyed by the model's file name in mlx-lm. Whether a type can be compressed safely depends on its
whole forward pass, which builds masks and determines positions. That is why every type on the list has been reviewed
and is run by the conformance test.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.utils import MODEL_REMAPPING

from .family import AttentionFamily as Family

_SLIDING_NOTE = "sliding-window layers stay as they are"
_LINEAR = "linear and state-space layers stay as they are"
_PER_HEAD = "keys and values are stored per head"
# Configuration field with the number of head dimensions that RoPE rotates.
ROTARY_TAIL = "qk_rope_head_dim"
_BORROWED = (
    "layers without entries of their own vote for those that they read; "
    "a layer that lends its entries reads all of them under sparse attention"
)
_LATENTS = "latents and positional keys are one head's entries (MLA)"
_LENT = "this model's layers lend each other entries past mlx-lm's quantised attention"


def _reason_unless(
    are_supported: Callable[[list], bool], reason: str
) -> Callable[[list], str | None]:
    """Return a function that returns `reason` for unsupported attention modules, otherwise None."""
    return lambda attentions: None if are_supported(attentions) else reason


def _always(reason: str) -> Callable[[list], str]:
    """Return a function that always returns `reason`."""
    return lambda attentions: reason


def _uses_sliding_window(layer) -> bool:
    """Return whether a layer uses a sliding window.

    The class of the layer's cache does not show this, because models that wrap LLaMA, such as Pixtral, get full
    caches for all layers.
    """
    return getattr(layer, "use_sliding", False)


def _replaces_attention(layer) -> bool:
    """Return whether a linear module replaces the layer's attention."""
    return type(layer.self_attn).__name__ == "LinearSubblockReplacement"


def _rope_of_frequencies(attention) -> Callable[..., mx.array]:
    """Build a RoPE callable for an attention module that stores frequencies instead of a RoPE object."""
    options = {"traditional": False, "base": None, "scale": 1.0, "freqs": attention._rope_freqs}
    return lambda x, offset: mx.fast.rope(x, x.shape[-1], offset=offset, **options)


def _similar_families(names: str, **common_fields: Any) -> list[Family]:
    """Return one family per name. A name is `module`, or `module:ClassName` if the class is not `Attention`."""
    families: list[Family] = []
    for name in names.split():
        module, _, class_name = name.partition(":")
        families.append(Family(module, class_name or "Attention", **common_fields))
    return families


_MLA: dict[str, Any] = {
    "latent": True,
    "extra_capture": "rope",
    "rotary_tail": ROTARY_TAIL,
    "why_unquantizable": _always(
        "mlx-lm multiplies this model's latents past its quantised attention"
    ),
    "note": _LATENTS,
}
_HYBRID_MLA = _MLA | {"note": f"{_LATENTS}; {_LINEAR}"}

_DECLARED_FAMILIES = (
    *_similar_families(
        """Klear:KlearAttention apertus:ApertusAttention bailing_moe:BailingMoeAttention bitnet cohere dbrx
        deepseek:DeepseekAttention dots1:Dots1Attention ernie4_5 ernie4_5_moe exaone:AttentionModule gemma
        glm:GLMAttention glm4:Glm4Attention glm4_moe gpt_neox granite granitemoe:GraniteMoeAttention
        helium:HeliumAttention hunyuan hunyuan_v1_dense internlm2 internlm3 lille-130m:Lille130mAttention mimo
        minicpm minimax:MiniMaxAttention mixtral:MixtralAttention nemotron olmo2 olmoe openelm phi3 phimoe qwen2
        qwen2_moe qwen3 qwen3_moe seed_oss starcoder2 telechat3:Telechat3Attention"""
    ),
    *_similar_families("phi:PhiAttention phixtral:RoPEAttention stablelm", scale=None),
    Family("qwen", rope="rotary_emb"),
    *_similar_families("gptj:GPTJAttention", scale="scale_attn"),
    *_similar_families("gpt2 gpt_bigcode", rope=None, note="learned positions"),
    *_similar_families("nanochat talkie", rope=_rope_of_frequencies),
    Family("plamo", tiled=True, rope="rotary_emb", note="query heads are tiled over KV heads"),
    Family("nanbeige", note="every pass of its loop has entries of its own"),
    *_similar_families(
        "afmoe gemma3_text laguna mellum olmo3:Olmo3Attention plamo3 spark2_5 step3p5:Step3p5Attention",
        note=_SLIDING_NOTE,
    ),
    *_similar_families("llama ministral3", note=_SLIDING_NOTE, is_idle=_uses_sliding_window),
    Family("cohere2", rope_switch="use_sliding_window", note=_SLIDING_NOTE),
    *_similar_families("exaone4 muse_glimmer", rope_switch="use_rope", note=_SLIDING_NOTE),
    Family(
        "exaone_moe",
        rope_switch="use_rope",
        note=_SLIDING_NOTE,
        why_refused=_reason_unless(
            lambda attentions: any(attention.is_sliding_window for attention in attentions),
            "without sliding-window layers it still asks its first layer for a sliding-window mask",
        ),
    ),
    Family("llama4", rope_switch="use_rope", note="chunked-attention layers stay as they are"),
    Family("llama4_text", rope_switch="use_rope"),
    Family("mimo_v2_flash", sinks="attention_sink_bias", note=_SLIDING_NOTE),
    *_similar_families(
        "gpt_oss:AttentionBlock",
        scale="sm_scale",
        sinks="sinks",
        note=f"attention sinks take part in the votes; {_SLIDING_NOTE}",
    ),
    Family("baichuan_m1", note=f"{_SLIDING_NOTE}, and so does the convolution of keys and values"),
    Family(
        "gear",
        note=f"{_SLIDING_NOTE}, and so do convolutions",
        why_refused=_reason_unless(
            lambda attentions: not any(a.attn_logit_softcapping for a in attentions),
            "with attn_logit_softcapping it computes scores of its own instead of calling mlx-lm's attention",
        ),
    ),
    Family(
        "gemma4_text",
        note=f"{_SLIDING_NOTE}; {_BORROWED}",
        is_borrower=lambda attention: not attention.has_kv,
        lender_key=lambda attention: attention.is_sliding,
        why_unquantizable=_reason_unless(
            lambda attentions: all(a.has_kv for a in attentions), _LENT
        ),
    ),
    Family(
        "gemma3n",
        "Gemma3nAttention",
        note=f"{_SLIDING_NOTE}; {_BORROWED}",
        is_borrower=lambda attention: attention.is_kv_shared_layer,
        lender_key=lambda attention: attention.is_sliding,
    ),
    Family(
        "iquestloopcoder",
        method="attention",
        extra_passes=1,
        note="both passes of its loop vote",
        why_unquantizable=_always(_LENT),
    ),
    Family(
        "plamo2",
        attention_function="mx.fast",
        note=_LINEAR,
        why_unquantizable=_always("this model calls MLX's attention past mlx-lm's quantised one"),
    ),
    Family(
        "gemma2",
        attention_function="",
        extra_capture="rope",
        logit_cap="attn_logit_softcapping",
        note="votes are of its capped logits",
        why_unquantizable=_always(
            "this model computes scores itself, past mlx-lm's quantised attention"
        ),
    ),
    *_similar_families(
        """deepseek_v3:DeepseekV3Attention glm4_moe_lite:Glm4MoeLiteAttention longcat_flash:LongcatFlashMLA""",
        **_MLA,
    ),
    *_similar_families(
        "bailing_hybrid:MultiLatentAttention bailing_moe_v3:BailingMLA", **_HYBRID_MLA
    ),
    *_similar_families(
        "kimi_k3:KimiK3MLAAttention kimi_linear:KimiMLAAttention",
        **(_HYBRID_MLA | {"rope": None, "rotary_tail": None, "extra_capture": "split"}),
    ),
    Family("mistral4", "Mistral4Attention", query_factor=1, **_MLA),
    *_similar_families(
        """bailing_moe_linear falcon_h1:FalconH1Attention granitemoehybrid:GraniteMoeHybridAttention olmo_hybrid
        qwen3_next:Qwen3NextAttention""",
        note=_LINEAR,
    ),
    *_similar_families(
        "jamba:JambaAttention nemotron_h:NemotronHAttention", rope=None, note=_LINEAR
    ),
    *_similar_families("lfm2 lfm2_moe", note="convolution layers stay as they are"),
    *_similar_families(
        "deepseek_v2:DeepseekV2Attention youtu_llm:YoutuLLMAttention",
        rotary_tail=ROTARY_TAIL,
        note=_PER_HEAD,
    ),
    Family("minicpm3", scale="softmax_scale", rotary_tail=ROTARY_TAIL, note=_PER_HEAD),
    Family(
        "nemotron-nas",
        note="layers whose attention is replaced by a linear one stay as they are",
        why_refused=_reason_unless(
            lambda attentions: attentions[0] is not None,
            "it makes all masks from its first cache, and its first layer has no attention to fill it",
        ),
        is_idle=_replaces_attention,
    ),
)
FAMILIES: dict[str, Family] = {family.module: family for family in _DECLARED_FAMILIES}

# Model type -> the types whose files define its decoder layers.
_DECODER_LAYER_TYPES: dict[str, tuple[str, ...]] = {
    "gemma3": ("gemma3_text",),
    "gemma4": ("gemma4_text",),
    "kimi_k25": ("deepseek_v3",),
    "kimi_vl": ("deepseek_v3",),
    "lfm2-vl": ("lfm2",),
    "longcat_flash_ngram": ("longcat_flash",),
    "mistral3": ("llama", "ministral3", "mistral4"),
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

# Model type -> its layers' attention families.
SUPPORTED: dict[str, tuple[Family, ...]] = {
    name: tuple(FAMILIES[module] for module in _DECODER_LAYER_TYPES.get(name, (name,)))
    for name in sorted({*FAMILIES, *_DECODER_LAYER_TYPES}, key=str.lower)
}

# Model type -> why it is not supported.
REFUSED: dict[str, str] = {
    **dict.fromkeys(
        ("deepseek_v32", "glm_moe_dsa"),
        "its indexer picks entries by their place in a cache of its own, which would have to lose the same ones",
    ),
    **dict.fromkeys(
        ("mamba", "mamba2", "rwkv7"), "it has no attention, so there is no KV cache to compress"
    ),
    "afm7": "its last layers read the entries of an earlier layer and take positions from their number",
    "deepseek_v41": "it keeps windows, groups and indices of its own instead of a KV cache",
    "minimax_m3_vl": "it picks blocks of entries by their place in the cache, which eviction changes",
    "muse_spark": "its attention needs a Metal kernel, without which this version could not be tried on it",
    "olmo": "mlx-lm's own forward pass of it fails for more than one token at a time",
    "phi3small": "its block-sparse mask is made from the entries' places in the cache, which eviction changes",
    "recurrent_gemma": "all of its attention layers are sliding windows, which are small already",
}


def supported_types() -> list[tuple[str, str, str]]:
    """List the supported types.

    Returns: `(name, aliases, note)` for each type. Aliases are other `model_type`s that mlx-lm maps to the type.
    """
    rows: list[tuple[str, str, str]] = []
    for name, families in SUPPORTED.items():
        notes = [family.note for family in families if family.note]
        if any(family.no_sparse for family in families):
            notes.append("no sparse attention")
        unique_notes = dict.fromkeys(notes)
        rows.append((name, _aliases(name), "; ".join(unique_notes)))
    return rows


def refused_types() -> list[tuple[str, str, str]]:
    """List the types that are known to be unsupported.

    Returns: `(name, aliases, reason)` for each type; see `supported_types`.
    """
    return [(name, _aliases(name), reason) for name, reason in sorted(REFUSED.items())]


def _aliases(name: str) -> str:
    """Return a comma-separated list of the other `model_type`s that mlx-lm maps to a type."""
    return ", ".join(sorted(alias for alias, target in MODEL_REMAPPING.items() if target == name))
