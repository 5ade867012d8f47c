"""GGUF checkpoints are converted to folders that mlx-lm can load. Whole files are written and read."""

import json

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm import load
from mlx_lm.models import gemma3_text, llama, qwen2
from tokenizers import pre_tokenizers
from transformers import Qwen2Tokenizer

gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install -e '.[real]'")
import gguf_folder  # noqa: E402

TEMPLATE = "{% for message in messages %}<s>{{ message['content'] }}{% endfor %}"
SPECIAL, NORMAL, USER_DEFINED, BYTE = 3, 1, 4, 6
# GGUF's name of a field: mlx-lm's name, and the value in these tests.
FIELDS = {
    "block_count": ("num_hidden_layers", 2),
    "embedding_length": ("hidden_size", 12),
    "feed_forward_length": ("intermediate_size", 20),
    "head_count": ("num_attention_heads", 4),
    "head_count_kv": ("num_key_value_heads", 2),
    "key_length": ("head_dim", 6),
    "rope_freq_base": ("rope_theta", 500.0),
    "layer_norm_rms_eps": ("rms_norm_eps", 1e-5),
}


def write_gguf(path, family, args, tokenizer, tensors):
    """Write a GGUF file with gguf's own writer, as llama.cpp's converter does."""
    writer = gguf.GGUFWriter(path, family)
    fields = {name: getattr(args, of) for name, (of, _) in FIELDS.items() if hasattr(args, of)}
    fields["context_length"] = 64
    if family == "gemma3":
        fields["sliding_window"] = args.sliding_window
    for name, value in (fields | tokenizer).items():
        getattr(writer, f"add_{name}")(value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors_of(model, family):
    """Return a model's weights under llama.cpp's names, changed as llama.cpp's converter changes them."""
    modules = gguf_folder.MODULES | gguf_folder.MODULES_OF[family]
    parts = {module: part for part, module in modules.items()}
    tensors = {}
    for path, weight in tree_flatten(model.parameters()):
        path, _, kind = path.removeprefix("model.").rpartition(".")
        weight = np.array(weight)
        if family == "llama" and path.endswith(("q_proj", "k_proj")):
            halves = weight.reshape(-1, 2, model.args.head_dim // 2, weight.shape[-1])
            weight = halves.swapaxes(1, 2).reshape(weight.shape)
        if family == "gemma3" and path.endswith("norm"):
            weight = weight + 1
        if path.startswith("layers."):
            _, layer, module = path.split(".", 2)
            tensors[f"blk.{layer}.{parts[module]}.{kind}"] = weight
        else:
            tensors[f"{parts[path]}.{kind}"] = weight
    return tensors


def byte_level():
    """Return the fields of a tokenizer with all bytes, a few merges, two special tokens and a template."""
    merges = ["h e", "l l", "he ll", "Ġ hell", "1 2"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<s>", "</s>", *letters, *(merge.replace(" ", "") for merge in merges)]
    return {
        "tokenizer_model": "gpt2",
        "tokenizer_pre": "smollm",
        "token_list": tokens,
        "token_types": [SPECIAL] * 2 + [NORMAL] * (len(tokens) - 2),
        "token_merges": merges,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "unk_token_id": 0,
        "pad_token_id": 1,
        "chat_template": TEMPLATE,
    }


def sentencepiece():
    """Return the fields of a tokenizer with special tokens, double spaces, line breaks, all bytes and a few pieces."""
    kinds = dict.fromkeys(["<pad>", "<eos>", "<bos>", "<unk>"], SPECIAL)
    kinds |= dict.fromkeys(["  ", "\n"], USER_DEFINED)
    kinds |= dict.fromkeys([f"<0x{byte:02X}>" for byte in range(256)], BYTE)
    kinds |= dict.fromkeys(["ll", "he", "hell", "▁hell", "el", *"▁helo"], NORMAL)
    return {
        "tokenizer_model": "llama",
        "tokenizer_pre": "default",
        "token_list": list(kinds),
        "token_types": list(kinds.values()),
        "token_scores": [-float(number) for number in range(len(kinds))],
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
        "unk_token_id": 3,
    }


SIZES = dict(FIELDS.values())


def a_llama(n_tokens):
    return llama.Model(llama.ModelArgs(model_type="llama", vocab_size=n_tokens, **SIZES))


def a_gemma(n_tokens):
    sizes = SIZES | {"num_hidden_layers": 7, "vocab_size": n_tokens, "query_pre_attn_scalar": 6}
    args = gemma3_text.ModelArgs(model_type="gemma3_text", sliding_window=4, **sizes)
    model = gemma3_text.Model(args)
    model.sanitize({})  # ties the embeddings
    return model


def a_qwen(n_tokens):
    sizes = SIZES | {"hidden_size": 16, "vocab_size": n_tokens, "tie_word_embeddings": False}
    del sizes["head_dim"]
    return qwen2.Model(qwen2.ModelArgs("qwen2", **sizes))


def converted(tmp_path, family, make, fields):
    """Convert a random model's GGUF file, assert equal logits, and return the converted tokenizer."""
    mx.random.seed(0)
    model = make(len(fields["token_list"]))
    model.apply(lambda weight: mx.random.normal(weight.shape) / 2)
    write_gguf(tmp_path / "gguf", family, model.args, fields, tensors_of(model, family))
    (folder := tmp_path / "folder").mkdir()
    gguf_folder.write_folder(tmp_path / "gguf", folder)
    loaded, tokenizer = load(str(folder))
    tokens = mx.arange(10)[None]  # beyond Gemma's window
    assert loaded.model.embed_tokens.weight.dtype == mx.float32
    np.testing.assert_allclose(loaded(tokens), model(tokens), atol=1e-4)
    return tokenizer


def test_a_llama_with_byte_level_pieces_is_converted(tmp_path):
    tokenizer = converted(tmp_path, "llama", a_llama, byte_level())
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("hello hell12</s>")) == [
        *("hell", "o", "Ġhell", "1", "2", "</s>")
    ]
    text = "naïve  日本\n\t 1234 🎉<s>"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_token_ids == {1}
    chat = [{"role": "user", "content": "o"}]
    assert tokenizer.apply_chat_template(chat) == tokenizer.encode("<s>o")


def test_a_qwen_with_untied_output_is_converted_to_several_files(tmp_path, monkeypatch):
    fields = byte_level() | {"tokenizer_pre": "qwen2"}
    del fields["unk_token_id"]
    monkeypatch.setattr(gguf_folder, "SHARD_BYTES", 10_000)  # the embeddings alone are larger
    tokenizer = converted(tmp_path, "qwen2", a_qwen, fields)
    files = {path.name for path in (tmp_path / "folder").glob("model-*.safetensors")}
    index = json.loads((tmp_path / "folder" / "model.safetensors.index.json").read_text())
    assert len(files) == 4 and set(index["weight_map"].values()) == files
    vocabulary = {piece: number for number, piece in enumerate(fields["token_list"])}
    merges = [tuple(merge.split(" ")) for merge in fields["token_merges"]]
    theirs = Qwen2Tokenizer(vocab=vocabulary, merges=merges)
    text = "  hell12 HE'LL \r\n\n(hello)  it's\t½ é e\u0301 日本 🎉\n \n x."
    assert tokenizer.encode(text) == theirs.encode(text)
    split = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("it's 12\n\n  x")
    assert [part for part, _ in split] == ["it", "'s", "Ġ", "1", "2", "ĊĊ", "Ġ", "Ġx"]


def test_a_gemma_with_sentencepieces_is_converted(tmp_path):
    tokenizer = converted(tmp_path, "gemma3", a_gemma, sentencepiece())
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("hell hello  é\n")) == [
        *("<bos>", "hell", "▁hell", "o", "▁▁", "<0xC3>", "<0xA9>", "\n")
    ]
    text = "hello   日本\n\t 1234 🎉<eos>"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert tokenizer.eos_token_ids == {1} and tokenizer.chat_template is None
