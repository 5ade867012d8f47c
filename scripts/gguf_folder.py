"""Convert a GGUF checkpoint to a folder that mlx-lm loads: float32 weights, configuration, tokenizer, chat template.

LLaMA and Qwen 2 with a byte-level BPE (SmolLM2's and Qwen's), and Gemma 3 with SentencePiece's BPE are supported.
llama.cpp's converter changes names, the order of rows and some weights. `module_name` restores the names, and
`weight_of` the rest.
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
    is_tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    contents = {
        "config.json": config(metadata, is_tied),
        "tokenizer_config.json": tokenizer_config(metadata),
        "special_tokens_map.json": special_tokens(metadata),
    }
    for file_name, content in contents.items():
        _write_json(folder / file_name, content)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def save_weights(tensors: list[ReaderTensor], metadata: Metadata, folder: Path) -> None:
    """Write every tensor in float32, sharded like mlx-lm's files. Only one file's tensors are in memory at a time."""
    all_shards = shards(tensors)
    n_shards = len(all_shards)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(all_shards, 1):
        arrays = {}
        for tensor in shard:
            module = module_name(tensor.name, metadata["general.architecture"])
            _, _, parameter = tensor.name.rpartition(".")  # "weight" or "bias"
            arrays[f"{module}.{parameter}"] = mx.array(weight_of(tensor, module, metadata))
        file = "model.safetensors"
        if n_shards > 1:
            file = f"model-{number:05}-of-{n_shards:05}.safetensors"
        mx.save_safetensors(str(folder / file), arrays, metadata={"format": "mlx"})
        weight_map |= dict.fromkeys(arrays, file)
    total_bytes = sum(_float32_bytes(tensor) for tensor in tensors)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)


def shards(tensors: list[ReaderTensor]) -> list[list[ReaderTensor]]:
    """Split the tensors into files of at most `SHARD_BYTES`. A larger tensor gets its own file."""
    all_shards: list[list[ReaderTensor]] = []
    n_free_bytes = -1  # bytes left in the last shard
    for tensor in tensors:
        if _float32_bytes(tensor) > n_free_bytes:
            all_shards.append([])
            n_free_bytes = SHARD_BYTES
        all_shards[-1].append(tensor)
        n_free_bytes -= _float32_bytes(tensor)
    return all_shards


def _float32_bytes(tensor: ReaderTensor) -> int:
    """Return a tensor's bytes in float32."""
    return 4 * int(tensor.n_elements)


def weight_of(tensor: ReaderTensor, module: str, metadata: Metadata) -> np.ndarray:
    """Return a float32 tensor as mlx-lm's `module` expects it."""
    from gguf import dequantize

    family = metadata["general.architecture"]
    array = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    if family == "llama" and module.endswith(("q_proj", "k_proj")):
        key = "head_count" if module.endswith("q_proj") else "head_count_kv"
        return halves_apart(array, metadata[f"llama.attention.{key}"])
    if family == "gemma3" and module.endswith("norm"):
        return array - 1  # llama.cpp multiplies by the weight, Gemma by 1 + weight
    return array


def module_name(name: str, family: str) -> str:
    """Return mlx-lm's module for a tensor: model.layers.3.self_attn.q_proj for blk.3.attn_q.weight."""
    *block_and_number, gguf_module, _ = name.split(".")
    modules = MODULES | MODULES_OF[family]
    module = modules[gguf_module]
    if block_and_number:
        _, layer = block_and_number
        return f"model.layers.{layer}.{module}"
    return module if module == "lm_head" else f"model.{module}"


def halves_apart(weight: np.ndarray, n_heads: int) -> np.ndarray:
    """Reorder each head's rows in weights `(n_heads * D, width)` from llama.cpp's order to mlx-lm's.

    mlx-lm's LLaMA applies RoPE to the pair of rows i and i + D/2, llama.cpp to rows 2i and 2i + 1.
    """
    pairs = weight.reshape(n_heads, -1, 2, weight.shape[-1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def config(metadata: Metadata, is_tied: bool) -> dict[str, Any]:
    """Return the contents of config.json. If `is_tied`, the output layer shares the embedding's weights."""
    family = metadata["general.architecture"]
    # Without the family's prefix: `llama.block_count` becomes `block_count`.
    gguf_values = {name.removeprefix(f"{family}."): value for name, value in metadata.items()}
    hidden_size, n_heads = gguf_values["embedding_length"], gguf_values["attention.head_count"]
    head_dim = gguf_values.get("attention.key_length", hidden_size // n_heads)
    values = {
        **CONFIG_OF[family],
        **{name: gguf_values[gguf_name] for name, gguf_name in CONFIG.items()},
        "head_dim": head_dim,
        "vocab_size": len(gguf_values["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": is_tied,
        "torch_dtype": "float32",
    }
    if family == "gemma3":
        values["sliding_window"] = gguf_values["attention.sliding_window"]
        values["query_pre_attn_scalar"] = head_dim
    return values


def tokenizer(metadata: Metadata) -> Tokenizer:
    """Return a tokenizer that splits text into the same tokens as llama.cpp."""
    make_bpe = byte_level_bpe if _is_byte_level(metadata) else sentencepiece_bpe
    bpe = make_bpe(metadata)
    special: list[AddedToken] = []
    user_defined: list[AddedToken] = []
    for piece, kind in zip(pieces(metadata), metadata["tokenizer.ggml.token_type"]):
        if kind == SPECIAL:
            special.append(AddedToken(piece, normalized=False))
        elif kind == USER_DEFINED:
            user_defined.append(AddedToken(piece, normalized=True))
    bpe.add_special_tokens(special)
    bpe.add_tokens(user_defined)
    return bpe


def _is_byte_level(metadata: Metadata) -> bool:
    return metadata["tokenizer.ggml.model"] == "gpt2"


def pieces(metadata: Metadata) -> list[str]:
    """Return the vocabulary, with U+2581 for SentencePiece's spaces. In GGUF, user-defined tokens have plain spaces."""
    tokens = metadata["tokenizer.ggml.tokens"]
    return tokens if _is_byte_level(metadata) else [token.replace(" ", SPACE) for token in tokens]


def byte_level_bpe(metadata: Metadata) -> Tokenizer:
    """Return a byte-level BPE. SmolLM2's splits at every digit, then like GPT-2; Qwen 2's splits by `QWEN2`."""
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    bpe = Tokenizer(models.BPE(_numbered(pieces(metadata)), merges))
    split: pre_tokenizers.PreTokenizer = pre_tokenizers.Digits(individual_digits=True)
    is_qwen = metadata["tokenizer.ggml.pre"] == "qwen2"
    if is_qwen:
        bpe.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(Regex(QWEN2), "isolated")
    bytes_as_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not is_qwen)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_as_letters])
    bpe.decoder = decoders.ByteLevel()
    return bpe


def sentencepiece_bpe(metadata: Metadata) -> Tokenizer:
    """Return Gemma's BPE: spaces are U+2581, merges may span words, unknown characters are bytes, <bos> is first."""
    vocabulary, names = pieces(metadata), special_tokens(metadata)
    scores, kinds = metadata["tokenizer.ggml.scores"], metadata["tokenizer.ggml.token_type"]
    merges = merges_of(vocabulary, scores, kinds)
    options: Any = {"unk_token": names["unk_token"], "fuse_unk": True, "byte_fallback": True}
    bpe = Tokenizer(models.BPE(_numbered(vocabulary), merges, **options))
    bpe.normalizer = normalizers.Replace(" ", SPACE)
    parts = decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()
    bpe.decoder = decoders.Sequence(list(parts))
    bos = names["bos_token"]
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A {bos} $B",
        special_tokens=[(bos, metadata["tokenizer.ggml.bos_token_id"])],
    )
    return bpe


def merges_of(
    vocabulary: list[str], scores: list[float], kinds: list[int]
) -> list[tuple[str, str]]:
    """Return SentencePiece's BPE merges: pairs of pieces that form another piece, ordered by its score, best first."""
    number_of = _numbered(vocabulary)
    scored_pairs = []
    for piece, score, kind in zip(vocabulary, scores, kinds):
        if kind != NORMAL:
            continue
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in number_of and right in number_of:
                scored_pairs.append((-score, number_of[left], number_of[right]))
    return [(vocabulary[left], vocabulary[right]) for _, left, right in sorted(scored_pairs)]


def _numbered(vocabulary: list[str]) -> dict[str, int]:
    return {piece: number for number, piece in enumerate(vocabulary)}


def special_tokens(metadata: Metadata) -> dict[str, str]:
    """Return the contents of special_tokens_map.json."""
    gguf_names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    vocabulary = metadata["tokenizer.ggml.tokens"]
    tokens = {}
    for name, gguf_name in gguf_names.items():
        token_id = metadata.get(f"tokenizer.ggml.{gguf_name}_token_id")
        if token_id is not None:
            tokens[f"{name}_token"] = vocabulary[token_id]
    return tokens


def tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    """Return the contents of tokenizer_config.json, with the chat template if the model has one."""
    family = metadata["general.architecture"]
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata[f"{family}.context_length"],
        "clean_up_tokenization_spaces": False,
        **special_tokens(metadata),
    }
    template = metadata.get("tokenizer.chat_template")
    if template:
        values["chat_template"] = template
    return values
