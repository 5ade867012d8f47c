"""A mistake causes one line on stderr and exit code 2, before anything is read or written."""

import json
import re
import shlex

import pytest
from batch_file_helpers import chat, write
from disk_helpers import full_disk
from model_configs import make_model
from model_folders import change, demo_with

from mlx_snapkv import SnapKVError
from mlx_snapkv.cli.cache_options import MLXCacheOptions

# A command line | words of its one line. {} is a folder with the files `text`, `blank` and `requests`.
MISTAKES = r"""
nonsense                                                 | No such command 'nonsense'.
generate --prompt x --model demo --snapkv top_k=4 --policy tova | --snapkv and --policy both name a policy
generate --prompt x --model demo --snapkv top_k=4 --policy auto | --snapkv and --policy both name a policy
generate --prompt x --model demo --policy snapkv --store foo | --store must be memory, 8bit
generate --prompt x --model demo --store file --store-dir {}/text | --store-dir must be a writable folder, got
generate --prompt "" --model demo                        | the prompt is empty: give some text
generate --model demo                                    | there is no prompt: give --prompt TEXT, --prompt - or
generate --prompt - --prompt-file - --model demo         | can't both read standard input
generate --prompt-file /dev/zero --model demo            | --prompt-file /dev/zero is not UTF-8 text
generate --prompt x --prompt-file {}/blank --model demo  | --prompt-file {}/blank: there is no text
generate --prompt x --prompt-file - --model demo         | standard input: there is no text
generate --prompt - --prompt-file {}/text --model demo   | standard input: there is no text
compare --prompt x --prompt-file /dev/null --model demo  | --prompt-file /dev/null: there is no text
compare --prompt x --model demo --policy none            | --policy none adds nothing here, since the full cache is
inspect --prompt x --prompt-file /dev/null --model demo --policy tova | --prompt-file /dev/null: there is no text
cache-prompt --prompt-file /dev/null --model demo -o {}/b.safetensors | --prompt-file /dev/null: there is no text
generate --prompt-file ~no-such-user/x --model demo      | --prompt-file ~no-such-user/x: no such home folder
generate --prompt \udcff --model demo                    | --prompt is not UTF-8 text
generate --prompt x --model demo --top-k 100000000       | must be less than the vocabulary's 1536, got 100000000
generate --prompt x --model demo --temp 101              | --temp must be from 0 to 100, got '101'
generate --prompt x --model demo --policy tova --quantized-kv-start 9 --kv-bits 8 | --quantized-kv-start is for the full
generate --prompt x --model demo --max-kv-size 512       | no effect on llama models, which make their own caches
generate --prompt x --model demo --adapter-path /no/such | --adapter-path /no/such: no adapter_config.json
generate --prompt x --model demo --ignore-chat-template --system-prompt y | --system-prompt needs a chat template
generate --prompt x --model demo --pipeline              | start the command with mlx.launch, or drop it
generate --prompt x --model demo --chat-template-config '{"tokenize": 1}' | --chat-template-config can't set 'tokenize'
generate --prompt x --model demo --extra-eos-token nope  | --extra-eos-token 'nope': the tokenizer has no such token
generate --prompt x --model a/b/c                        | no such folder, and not a valid Hugging Face repository name
generate --prompt x --model {}                           | not a model folder, since it has no config.json
generate --prompt x --model demo-qwen3-next --draft-model demo | the main model (qwen3_next) has layers
generate --prompt x --model demo --json-schema {}/none   | --json-schema {}/none: No such file
generate --prompt x --model demo --json-schema {}/text   | --json-schema is not JSON: JSONDecodeError
generate --prompt x --model demo --json-schema '{"a": 1' | --json-schema is not JSON: JSONDecodeError
generate --prompt x --model demo --json-schema '[1]'      | --json-schema must be a JSON object, such as '{"type": "obj
generate --prompt x --model demo --json-schema '"a"'      | --json-schema must be a JSON object, such as '{"type": "obj
generate --prompt x --model demo --json-schema 7          | --json-schema must be a JSON object, such as '{"type": "obj
generate --prompt x --model demo --json-schema '{"uniqueItems": true}' | --json-schema can't be enforced: unsupported
generate --prompt x --model demo --json-schema true --prefill-response y | drop --prefill-response
generate --prompt x --model demo --sparse "" --policy tova | says which entries stay, and --sparse says which are
generate --prompt x --model demo --sparse top=4          | unknown sparse option 'top' (did you mean 'top_k'?); known:
generate --prompt x --model demo --policy sparse         | it evicts nothing: give --sparse top_k=2048, for example
generate --prompt x --model demo --sparse store=8bit --store file | --sparse store=8bit and --store file differ: give
generate --prompt x --model demo --sparse store=memory --store 8bit | --sparse store=memory and --store 8bit differ
generate --prompt x --model demo --sparse store=file,store_dir=. --store-dir {} | store_dir=. and --store-dir {} differ
compare --prompt x --model demo --sparse "" --sparse store=memory --store 8bit | store=memory and --store 8bit differ
chat --model demo --store 8bit                           | --store 8bit says where sparse attention keeps all entries
compare --prompt x --model demo --policy tova --store 8bit | but tova evicts: give --sparse instead, or drop --store
generate --prompt x --model demo --sparse store=foo      | --sparse store=foo: sparse option store must be memory, 8bit
generate --prompt x --model demo --store memory          | --store memory says where sparse attention keeps all entries
batch {}/requests -o {}/a --model demo --policy tova --kv-bits 4 --kv-group-size 128 | must be one of [32, 64]
serve --port 0 --model demo --policy tova --kv-bits 4 --kv-group-size 128 | must be one of [32, 64]
batch {}/requests -o {}/a.jsonl --model none --store file | --store file says where sparse
serve --model none --store 8bit                          | --store 8bit says where sparse attention keeps
generate --prompt x --model demo --snapkv top_k=-1       | --snapkv top_k=-1: snapkv option top_k must be a whole number
compare --prompt x --model demo --sparse top_k=0         | --sparse top_k=0: sparse option top_k must be a whole number
bench --policy "keydiff:budget=0%"                       | --policy keydiff:budget=0%: keydiff option budget must be
generate --prompt x --model demo --policy snapkv:top_k=4,budget=9 | snapkv options top_k and budget say the same: give
generate --prompt x --model demo --sparse "" --kv-bits 8 | --sparse keeps all: give --store 8bit
cache-prompt --prompt x --model demo -o {}/no/b.safetensors | there is no folder {}/no
compare --prompt x --model demo -o {}/no/a.html          | there is no folder {}/no
inspect --prompt x --model demo --policy tova -o {}/no/a.html | there is no folder {}/no
batch {}/requests --model demo -o {}/no/a.jsonl          | there is no folder {}/no
bench --output {}/no/a                                   | there is no folder {}/no
eval fidelity --text {}/text --policy tova:budget=9 --output {}/no/a | there is no folder {}/no
cache-prompt --prompt x --model demo -o {}/b.safetensors --store file | but no policy was given
cache-prompt --prompt x --model demo -o {}/b.safetensors --store memory --policy snapkv | but snapkv evicts
cache-prompt --prompt x --model demo -o {}/b.safetensors --store memory --policy tova | but tova evicts
inspect --prompt x --model demo --policy tova --policy random --policy keydiff | must be given once, or twice to compare
batch {}/none -o {}/a.jsonl --model demo                 | No such file or directory
batch {}/text -o {}/a.jsonl --model demo                 | one JSON object per line, and line 1 is not JSON
batch {}/blank -o {}/a.jsonl --model demo                | one JSON object per line, and it has none
batch {}/requests -o /dev/full --model demo              | is not a regular file
batch {}/requests -o {}/a.jsonl --model demo --kv-bits 4 | in a batch --kv-bits needs a policy
batch {}/requests -o {}/a.jsonl --model demo --max-kv-bytes many | --max-kv-bytes must be a number of bytes, such as 500
plan --model demo --memory 16                           | from 1,000,000, such as 500MB or 4GB, got '16'
eval fidelity --text {}/text --policy snapkv --model none | snapkv would compress none of the prompts
eval fidelity --text {}/text --policy tova:budget=9 --output {}/ | is a folder
bench --context 4k                                       | --context must be whole numbers from 1024 to 10000000, sep
eval fidelity --text {}/text                             | needs --policy or --sparse
generate --prompt x --model demo --quantized-kv-start 0  | does nothing without --kv-bits: add that, or drop
generate --prompt x --model demo --num-draft-tokens 2    | --num-draft-tokens does nothing without --draft-model
generate --prompt x --model demo --store memory --store-dir . | --store-dir does nothing without --store file
serve --model demo --port 0 --prefix-dir-bytes 4GB       | --prefix-dir-bytes does nothing without --prefix-dir
plan --model demo --kv-memory 3MB                        | --kv-memory does nothing without --policy auto
eval fidelity --text {}/text --policy tova:budget=9 --question x | --question does nothing without --setting known or
eval fidelity --text {}/text --policy tova:budget=9 --question x --setting text | --question does nothing without
generate --prompt x --model demo --prompt-cache-file {}/text --num-draft-tokens 2 | --num-draft-tokens can't be
generate --prompt x --model demo --prompt-cache-file {}/text --policy auto --kv-memory 3MB | --kv-memory can't be
generate --prompt x --model demo --policy "keydiff:budget=9 then" | a policy is missing after 'then' in
generate --prompt x --model demo --policy "then keydiff" | a policy is missing before 'then' in 'then keydiff'
"""
ROWS = [re.split(r" +\| ", line) for line in MISTAKES.splitlines() if line]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("folder")
    (folder / "text").write_text("my notes")
    (folder / "blank").write_text(" \n\t\n")
    write(folder / "requests", [chat("a", 1)])
    return folder


@pytest.mark.parametrize("line, words", ROWS)
def test_a_mistake_is_one_line(refused, folder, line, words):
    line = line.replace("{}", str(folder)).replace(r"\udcff", "\udcff")
    assert words.replace("{}", str(folder)) in refused(*shlex.split(line))
    assert {path.name for path in folder.iterdir()} == {"text", "blank", "requests"}


def test_a_file_without_text_is_not_attached(refused, folder):
    stdin = f"/file {folder}/blank\n".encode()
    said = refused("chat", "--model", "demo", stdin=stdin)
    assert f"/file {folder}/blank: there is no text" in said


MODELS = [
    ("config.json", "{", "does not describe such a model: JSONDecodeError"),
    ("config.json", "{}", "does not describe such a model: KeyError: .model_type"),
    ("config.json", {"model_type": "no_such_type"}, "no_such_type not supported"),
    ("config.json", {"hidden_size": 64}, "weights don't fit its config.json: ValueError: .*shape"),
    ("model.safetensors", None, "the folder has no weights"),
    ("model.safetensors", 1000, "model.safetensors is damaged or incomplete"),
    ("tokenizer.json", None, "the folder has no tokenizer"),
    ("tokenizer.json", "hello", "its tokenizer can't be read"),
    ("tokenizer_config.json", {"chat_template": "{{ raise_exception('No system') }}"}, "failed: TemplateError: No sys"),
    ("tokenizer_config.json", {"chat_template": "{# nothing #}"}, "the chat template made an empty prompt"),
]  # fmt: skip


@pytest.mark.parametrize("name, how, message", MODELS)
def test_models_that_cannot_be_loaded(refused, tmp_path, name, how, message):
    """A file of the model is missing, truncated, changed or replaced."""
    folder = demo_with(tmp_path / "model")
    file = folder / name
    if isinstance(how, dict):
        change(file, **how)
    else:
        data = file.read_bytes()
        file.unlink()
        if how is not None:
            file.write_bytes(data[:how] if isinstance(how, int) else how.encode())
    assert re.search(message, refused("generate", "--model", str(folder), "--prompt", "x"))


def test_a_draft_model_with_another_tokenizer_is_refused(refused, tmp_path):
    folder = demo_with(tmp_path / "draft")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())["model"]
    tokenizer["vocab"]["another word"] = 100_000
    change(folder / "tokenizer.json", model=tokenizer)
    asked = ["generate", "--model", "demo", "--prompt", "x", "--draft-model", str(folder)]
    assert "a draft model needs the model's own tokenizer" in refused(*asked)


def test_a_rotating_cache_excludes_kv_bits_and_a_draft_model():
    model = make_model("seed_oss", {"head_dim": 32})
    for bits, draft, words in ((8, None, "with --kv-bits"), (None, "x", "with --draft-model")):
        options = MLXCacheOptions(kv_bits=bits, kv_group_size=32, max_kv_size=9)
        with pytest.raises(SnapKVError, match=words):
            options.require_supported(model, draft)


@pytest.mark.parametrize("name", ["x" * 5000, "\0"])
def test_names_that_no_file_can_have_are_refused(refused, name):
    for args in (["--model", name, "--prompt", "x"], ["--model", "demo", "--prompt-file", name]):
        assert refused("generate", *args)


FIDELITY = "eval fidelity --text {}/requests --length 16 --continuation 1 --policy tova:budget=8"
DISKS = [
    ("inspect --model demo -q --policy keydiff:budget=25% --prompt Cold. -m 2", "r.html", 5000),
    (FIDELITY, "r.jsonl", 100),
    ("batch {}/requests --model demo -q -m 2", "a.jsonl", 300),
]


@pytest.mark.parametrize("command, name, most", DISKS)
def test_a_full_disk_is_reported_with_the_file_and_changes_no_file(
    call, folder, tmp_path, monkeypatch, command, name, most
):
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "none"))  # git would write its index
    file, before = tmp_path / name, {}
    if name == "r.html":
        before = {file: '<meta name="generator" content="mlx-snapkv">'}
        file.write_text(before[file])
    output = file.with_suffix("") if name == "r.jsonl" else file
    with full_disk(most):
        code, _, err = call(*command.format(folder).split(), "--output", str(output))
    last = err.splitlines()[-1]
    assert code == 1 and str(file) in last and last.endswith("File too large")
    assert {p: p.read_text() for p in tmp_path.iterdir() if p.suffix != ".jsonl"} == before
