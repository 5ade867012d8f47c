"""Convert a GGUF checkpoint to a folder that mlx-lm loads: float32 weights, configuration, tokenizer, chat template.

LLaMA and Qwen 2 with a byte-level BPE (SmolLM2's and Qwen's), and Gemma 3 with SentencePiece's BPE are supported.
llama.cpp's converter changes names, the order of rows and some weights. `weight_of` reverses these changes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

if TYPE_CHECKING:
    from gguf import ReaderTensor

Metadata = dict[str, Any]

# llama.cpp's module names -> mlx-lm's: for all families, then for one family.
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
    "output": "lm_head",
}
MODULES_OF = {
    "llama": {"ffn_norm": "post_attention_layernorm"},
    "qwen2": {"ffn_norm": "post_attention_layernorm"},
    "gemma3": {
        "ffn_norm": "pre_feedforward_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
# Fields of config.json that depend only on the family. Gemma's last two are constants in llama.cpp, not in GGUF files.
CONFIG_OF: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    "gemma3": {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "sliding_window_pattern": 6,
        "rope_local_base_freq": 10_000.0,
    },
}
# Numbers in config.json -> llama.cpp's names for them.
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
# Values of `token_type`.
NORMAL, SPECIAL, USER_DEFINED = 1, 3, 4
SPACE = "\u2581"  # SentencePiece's character for a space
# Qwen 2 splits text into contractions, words with the preceding character, single digits, signs and white space.
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SHARD_BYTES = 2_000_000_000  # maximum bytes of weights per file


def write_folder(checkpoint: Path, folder: Path) -> None:
    """Convert a checkpoint into an existing folder. Raises: ValueError: the model's family is not supported."""
    from gguf import GGUFReader

    reader = GGUFReader(checkpoint)
    metadata = {name: field.contents() for name, field in reader.fields.items() if field.types}
    family = metadata["general.architecture"]
    if family not in MODULES_OF:
        raise ValueError(f"{family} is not a known family: {', '.join(MODULES_OF)}")
    save_weights(reader.tensors, metadata, folder)
    tokenizer(metadata).save(str(folder / "tokenizer.json"))
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    for name, made in {
        "config": config(metadata, tied),
        "tokenizer_config": tokenizer_config(metadata),
        "special_tokens_map": special_tokens(metadata),
    }.items():
        _write_json(folder / f"{name}.json", made)


def _write_json(path: Path, made: dict[str, Any]) -> None:
    path.write_text(json.dumps(made, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def save_weights(tensors: list[ReaderTensor], metadata: Metadata, folder: Path) -> None:
    """Write every tensor in float32, sharded like mlx-lm's files. Only one file's tensors are in memory at a time."""
    parts, weight_map = shards(tensors), {}
    for number, part in enumerate(parts, 1):
        which = f"-{number:05}-of-{len(parts):05}" if len(parts) > 1 else ""
        arrays = {}
        for tensor in part:
            name = module_name(tensor.name, metadata["general.architecture"])
            weight = mx.array(weight_of(tensor, name, metadata))
            arrays[f"{name}.{tensor.name.rpartition('.')[2]}"] = weight
        file = f"model{which}.safetensors"
        mx.save_safetensors(str(folder / file), arrays, metadata={"format": "mlx"})
        weight_map |= dict.fromkeys(arrays, file)
    size = sum(_size(tensor) for tensor in tensors)
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)


def shards(tensors: list[ReaderTensor]) -> list[list[ReaderTensor]]:
    """Split the tensors into files of at most `SHARD_BYTES`. A larger tensor gets its own file."""
    found: list[list[ReaderTensor]] = []
    room = -1
    for tensor in tensors:
        if _size(tensor) > room:
            found.append([])
            room = SHARD_BYTES
        found[-1].append(tensor)
        room -= _size(tensor)
    return found


def _size(tensor: ReaderTensor) -> int:
    """Return a tensor's bytes in float32."""
    return 4 * int(tensor.n_elements)


def weight_of(tensor: ReaderTensor, name: str, metadata: Metadata) -> np.ndarray:
    """Return a float32 tensor as mlx-lm's module `name` expects it."""
    from gguf import dequantize

    family = metadata["general.architecture"]
    array = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    if family == "llama" and name.endswith(("q_proj", "k_proj")):
        heads = "head_count" if name.endswith("q_proj") else "head_count_kv"
        return halves_apart(array, metadata[f"llama.attention.{heads}"])
    if family == "gemma3" and name.endswith("norm"):
        return array - 1  # llama.cpp multiplies by the weight, Gemma by 1 + weight
    return array


def module_name(name: str, family: str) -> str:
    """Return mlx-lm's module for a tensor: model.layers.3.self_attn.q_proj for blk.3.attn_q.weight."""
    *block, part, _ = name.split(".")
    module = (MODULES | MODULES_OF[family])[part]
    if block:
        return f"model.layers.{block[1]}.{module}"
    return module if module == "lm_head" else f"model.{module}"


def halves_apart(weight: np.ndarray, n_heads: int) -> np.ndarray:
    """Reorder each head's rows in weights `(n_heads * D, width)` from llama.cpp's order to mlx-lm's.

    mlx-lm's LLaMA applies RoPE to the pair of rows i and i + D/2, llama.cpp to rows 2i and 2i + 1.
    """
    pairs = weight.reshape(n_heads, -1, 2, weight.shape[-1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def config(metadata: Metadata, tied: bool) -> dict[str, Any]:
    """Return the contents of config.json. If `tied`, the output layer shares the embedding's weights."""
    family = metadata["general.architecture"]
    own = {name.removeprefix(f"{family}."): value for name, value in metadata.items()}
    hidden, heads = own["embedding_length"], own["attention.head_count"]
    head_dim = own.get("attention.key_length", hidden // heads)
    values = {
        **CONFIG_OF[family],
        **{ours: own[theirs] for ours, theirs in CONFIG.items()},
        "head_dim": head_dim,
        "vocab_size": len(own["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": tied,
        "torch_dtype": "float32",
    }
    if family == "gemma3":
        values["sliding_window"] = own["attention.sliding_window"]
        values["query_pre_attn_scalar"] = head_dim
    return values


def tokenizer(metadata: Metadata) -> Tokenizer:
    """Return a tokenizer that splits text into the same tokens as llama.cpp."""
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
    """Return the vocabulary, with U+2581 for SentencePiece's spaces. GGUF has plain spaces in user-defined runs."""
    tokens = metadata["tokenizer.ggml.tokens"]
    return tokens if _is_byte_level(metadata) else [token.replace(" ", SPACE) for token in tokens]


def byte_level_bpe(metadata: Metadata) -> Tokenizer:
    """Return a byte-level BPE. SmolLM2's splits at every digit, then like GPT-2; Qwen 2's splits by `QWEN2`."""
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE(_numbered(pieces(metadata)), merges))
    split: pre_tokenizers.PreTokenizer = pre_tokenizers.Digits(individual_digits=True)
    is_qwen = metadata["tokenizer.ggml.pre"] == "qwen2"
    if is_qwen:
        made.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(Regex(QWEN2), "isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not is_qwen)
    made.pre_tokenizer = pre_tokenizers.Sequence([split, letters])
    made.decoder = decoders.ByteLevel()
    return made


def sentencepiece_bpe(metadata: Metadata) -> Tokenizer:
    """Return Gemma's BPE: spaces are U+2581, merges may span words, unknown characters are bytes, <bos> is first."""
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
    """Return SentencePiece's BPE merges: pairs of pieces that form another piece, ordered by its score, best first."""
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
    """Return the contents of special_tokens_map.json."""
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    keys = {ours: f"tokenizer.ggml.{theirs}_token_id" for ours, theirs in names.items()}
    vocabulary = metadata["tokenizer.ggml.tokens"]
    return {f"{name}_token": vocabulary[metadata[k]] for name, k in keys.items() if k in metadata}


def tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    """Return the contents of tokenizer_config.json, with the chat template if the model has one."""
    template = metadata.get("tokenizer.chat_template")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata[f"{metadata['general.architecture']}.context_length"],
        "clean_up_tokenization_spaces": False,
        **special_tokens(metadata),
        **({"chat_template": template} if template else {}),
    }
