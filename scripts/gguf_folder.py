"""A GGUF checkpoint as a folder that mlx-lm loads: float32 weights, configuration, tokenizer, chat template.

It knows LLaMA with a byte-level BPE (SmolLM2's) and Gemma 3 with SentencePiece's BPE. llama.cpp's converter has changed
names, the order of rows and some weights; `weights` changes them back.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

if TYPE_CHECKING:
    from gguf import GGUFReader

Metadata = dict[str, Any]

# The modules of mlx-lm by llama.cpp's names, for every family and for one.
MODULES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
MODULES_OF = {
    "llama": {"ffn_norm": "post_attention_layernorm"},
    "gemma3": {
        "ffn_norm": "pre_feedforward_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
# What a configuration says of a family. The last two of Gemma's are constants in llama.cpp, so its files lack them.
CONFIG_OF: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "gemma3": {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "sliding_window_pattern": 6,
        "rope_local_base_freq": 10_000.0,
    },
}
# Names of its numbers in config.json, and llama.cpp's.
CONFIG = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "max_position_embeddings": "context_length",
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
}
# A piece's kinds in `token_type`.
NORMAL, SPECIAL, USER_DEFINED = 1, 3, 4
SPACE = "\u2581"  # SentencePiece's


def write_folder(checkpoint: Path, folder: Path) -> None:
    """Write a checkpoint into an existing folder. Raises: ValueError: the model is of another family."""
    from gguf import GGUFReader

    reader = GGUFReader(checkpoint)
    metadata = {name: field.contents() for name, field in reader.fields.items() if field.types}
    if (family := metadata["general.architecture"]) not in MODULES_OF:
        raise ValueError(f"{family} is not a known family: {', '.join(MODULES_OF)}")
    arrays = {name: mx.array(array) for name, array in weights(reader, metadata).items()}
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, metadata={"format": "mlx"})
    tokenizer(metadata).save(str(folder / "tokenizer.json"))
    for name, made in {
        "config": config(metadata),
        "tokenizer_config": tokenizer_config(metadata),
        "special_tokens_map": special_tokens(metadata),
    }.items():
        text = json.dumps(made, indent=2, ensure_ascii=False) + "\n"
        (folder / f"{name}.json").write_text(text, encoding="utf-8")


def weights(reader: GGUFReader, metadata: Metadata) -> dict[str, np.ndarray]:
    """Every tensor in float32, as mlx-lm names and expects it."""
    from gguf import dequantize

    family = metadata["general.architecture"]
    found = {}
    for tensor in reader.tensors:
        array = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        name = module_name(tensor.name, family)
        if family == "llama" and name.endswith(("q_proj", "k_proj")):
            heads = "head_count" if name.endswith("q_proj") else "head_count_kv"
            array = halves_apart(array, metadata[f"llama.attention.{heads}"])
        if family == "gemma3" and name.endswith("norm"):
            array = array - 1  # llama.cpp multiplies by the weight, Gemma by 1 + weight
        found[f"{name}.{tensor.name.rpartition('.')[2]}"] = array
    return found


def module_name(name: str, family: str) -> str:
    """mlx-lm's module of a tensor: blk.3.attn_q.weight is model.layers.3.self_attn.q_proj."""
    *block, part, _ = name.split(".")
    module = (MODULES | MODULES_OF[family])[part]
    return f"model.layers.{block[1]}.{module}" if block else f"model.{module}"


def halves_apart(weight: np.ndarray, n_heads: int) -> np.ndarray:
    """Undo llama.cpp's order of a head's rows, of weights `(n_heads * D, width)`.

    The rotation of mlx-lm's LLaMA pairs row i with row i + D/2, llama.cpp's row 2i with row 2i + 1.
    """
    pairs = weight.reshape(n_heads, -1, 2, weight.shape[-1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def config(metadata: Metadata) -> dict[str, Any]:
    family = metadata["general.architecture"]
    own = {name.removeprefix(f"{family}."): value for name, value in metadata.items()}
    hidden, heads = own["embedding_length"], own["attention.head_count"]
    head_dim = own.get("attention.key_length", hidden // heads)
    values = {
        **CONFIG_OF[family],
        **{ours: own[theirs] for ours, theirs in CONFIG.items()},
        "head_dim": head_dim,
        "vocab_size": len(own["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    if family == "gemma3":
        values["sliding_window"] = own["attention.sliding_window"]
        values["query_pre_attn_scalar"] = head_dim
    return values


def tokenizer(metadata: Metadata) -> Tokenizer:
    """tokenizer.json: the tokens of a text as llama.cpp finds them."""
    made = byte_level_bpe(metadata) if _is_byte_level(metadata) else sentencepiece_bpe(metadata)
    kinds = list(zip(pieces(metadata), metadata["tokenizer.ggml.token_type"]))
    special = [AddedToken(piece, normalized=False) for piece, kind in kinds if kind == SPECIAL]
    users = [AddedToken(piece, normalized=True) for piece, kind in kinds if kind == USER_DEFINED]
    made.add_special_tokens(special)
    made.add_tokens(users)
    return made


def _is_byte_level(metadata: Metadata) -> bool:
    return metadata["tokenizer.ggml.model"] == "gpt2"


def pieces(metadata: Metadata) -> list[str]:
    """The vocabulary. llama.cpp writes SentencePiece's user-defined runs of spaces as spaces, all others as U+2581."""
    tokens = metadata["tokenizer.ggml.tokens"]
    return tokens if _is_byte_level(metadata) else [token.replace(" ", SPACE) for token in tokens]


def byte_level_bpe(metadata: Metadata) -> Tokenizer:
    """SmolLM2's: every digit alone, then words as GPT-2 splits them, then the merges."""
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE(_numbered(pieces(metadata)), merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    made.decoder = decoders.ByteLevel()
    return made


def sentencepiece_bpe(metadata: Metadata) -> Tokenizer:
    """Gemma's: spaces as U+2581, merges anywhere in a text, unknown characters as bytes, <bos> in front."""
    vocabulary, named = pieces(metadata), special_tokens(metadata)
    scores, kinds = (metadata[f"tokenizer.ggml.{name}"] for name in ("scores", "token_type"))
    merges = merges_of(vocabulary, scores, kinds)
    options: Any = {"unk_token": named["unk_token"], "fuse_unk": True, "byte_fallback": True}
    made = Tokenizer(models.BPE(_numbered(vocabulary), merges, **options))
    made.normalizer = normalizers.Replace(" ", SPACE)
    parts = decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()
    made.decoder = decoders.Sequence(list(parts))
    first = named["bos_token"]
    made.post_processor = processors.TemplateProcessing(
        single=f"{first} $A",
        pair=f"{first} $A {first} $B",
        special_tokens=[(first, metadata["tokenizer.ggml.bos_token_id"])],
    )
    return made


def merges_of(
    vocabulary: list[str], scores: list[float], kinds: list[int]
) -> list[tuple[str, str]]:
    """The merges of SentencePiece's BPE: every two pieces that make a third, the best third first."""
    known = _numbered(vocabulary)
    found = [
        (-score, known[piece[:cut]], known[piece[cut:]])
        for piece, score, kind in zip(vocabulary, scores, kinds)
        if kind == NORMAL
        for cut in range(1, len(piece))
        if piece[:cut] in known and piece[cut:] in known
    ]
    return [(vocabulary[left], vocabulary[right]) for _, left, right in sorted(found)]


def _numbered(vocabulary: list[str]) -> dict[str, int]:
    return {piece: number for number, piece in enumerate(vocabulary)}


def special_tokens(metadata: Metadata) -> dict[str, str]:
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    vocabulary = metadata["tokenizer.ggml.tokens"]
    ids = {ours: metadata[f"tokenizer.ggml.{theirs}_token_id"] for ours, theirs in names.items()}
    return {f"{name}_token": vocabulary[i] for name, i in ids.items()}


def tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    """tokenizer_config.json, with the chat template if the model has one."""
    template = metadata.get("tokenizer.chat_template")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata[f"{metadata['general.architecture']}.context_length"],
        "clean_up_tokenization_spaces": False,
        **special_tokens(metadata),
        **({"chat_template": template} if template else {}),
    }
