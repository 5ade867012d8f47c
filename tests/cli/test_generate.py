"""The real command: exact output, exit codes, no tracebacks."""

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import fork_helpers
import pytest
from model_folders import change, demo_with

from mlx_snapkv.demo.questions import make_haystack

MODULE = [sys.executable, "-m", "mlx_snapkv"]
INSTALLED = [str(Path(sys.executable).with_name("mlx-snapkv"))]


def run(*args, command=MODULE):
    """The command as a user starts it: (exit code, stdout, stderr)."""
    done = subprocess.run([*command, *args], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


LEAD = "The access code of the amber falcon is 482913. It was cold. The access code of the amber falcon is"
PLAIN = ["generate", "--model", "demo", "--ignore-chat-template", "-m", "6", "--prompt", LEAD]


@pytest.mark.parametrize("command", [MODULE, INSTALLED], ids=["python -m", "installed"])
def test_the_answer_goes_to_stdout_and_the_figures_to_stderr(command):
    if not Path(command[0]).exists():
        pytest.skip("the package is not installed here")
    code, out, err = run(*PLAIN, command=command)
    assert (code, out) == (0, "482913\n")
    *_, closing = err.strip().splitlines()
    assert re.fullmatch(
        r"\d+ prompt tokens, full cache \(no policy; add --snapkv top_k=N to compress\) \| "
        r"prompt [\d.]+ tokens/s, generation [\d.]+ tokens/s, peak memory [\d.]+ GB",
        closing,
    )


def test_progress_is_shown_on_stderr():
    done = fork_helpers.run([*MODULE, *PLAIN], capture_output=True, text=True)
    out, err = done.stdout, done.stderr
    assert "reading the prompt" in err and "tokens/s" in err and "reading" not in out


def test_compression_is_reported(call, tmp_path):
    file = tmp_path / "document.txt"
    file.write_text(("It was cold at the market. " * 40) + LEAD)
    code, out, err = call(
        "generate", "--model", "demo", "--ignore-chat-template", "-m", "6", "--prompt-file", str(file),
        "--snapkv", "top_k=16,n_sink=4,n_window=32,lookahead=4",
    )  # fmt: skip
    assert code == 0 and out.strip() == "482913"
    closing = err.strip().splitlines()[-1]
    assert re.search(
        r"prompt tokens, 52 entries kept, KV memory [\d.]+ [kM]B → [\d.]+ kB \(float32, with room for more\) \| prompt",
        closing,
    )


def test_a_gated_prompt_is_told_how_to_force_compression(call):
    code, _, err = call(*PLAIN, "--snapkv", "top_k=16,min_ctx=49152")
    assert code == 0
    assert re.search(
        r"full cache: the prompt's \d+ tokens are below min_ctx=49152; set min_ctx=0 to force", err
    )


def test_quiet_prints_the_answer_alone(call):
    assert call(*PLAIN, "--quiet") == (0, "482913\n", "")


def test_json_holds_answer_figures_and_report(call):
    code, out, _ = call(
        *PLAIN, "--json", "--snapkv", "top_k=4,n_sink=2,n_window=16,obs_window=8,lookahead=4"
    )
    result = json.loads(out)
    assert code == 0
    assert result["model"] == "demo"
    assert set(result) == {
        "model", "text", "prompt_tokens", "prompt_tps", "generation_tokens", "generation_tps", "finish_reason",
        "peak_memory_gb", "compression",
    }  # fmt: skip
    assert result["compression"]["entries_kept"] == [22, 22, 22]
    assert result["compression"]["reason"] is None


def test_stdin_and_file_make_one_prompt(call, tmp_path):
    first, rest = LEAD.split(" It was cold. ")
    args = ["generate", "--model", "demo", "--ignore-chat-template", "-m", "6", "--quiet"]
    file = tmp_path / "fact.txt"
    file.write_text(first)
    expected = call(*args, "--prompt", f"{first}\\n\\n{rest}")
    assert expected[0] == 0 and "482913" in expected[1]
    assert call(*args, "--prompt", "-", stdin=f"{first}\n\n{rest}".encode()) == expected
    assert call(*args, "--prompt-file", str(file), "--prompt", rest) == expected
    assert call(*args, "--prompt-file", "-", "--prompt", rest, stdin=first.encode()) == expected


def test_a_seed_fixes_the_sampling(call):
    args = [*PLAIN, "--quiet", "--temp", "2", "--top-p", "0.9", "--seed", "7"]
    assert call(*args) == call(*args)


def test_quantised_entries_of_a_short_prompt(call):
    assert call(*PLAIN, "--quiet", "--kv-bits", "8")[:2] == (0, "482913\n")


@pytest.fixture
def without_own_caches(tmp_path):
    """The embedded model as one of a type that leaves its caches to mlx-lm."""
    return str(demo_with(tmp_path / "seed_oss", model_type="seed_oss", attention_out_bias=False))


def test_a_rotating_cache(call, without_own_caches, tmp_path):
    asked = ["generate", "--model", without_own_caches, "--ignore-chat-template", "-m", "6"]
    file = tmp_path / "document.txt"
    file.write_text(("It was cold at the market. " * 200) + LEAD)
    code, out, err = call(*asked, "--prompt-file", str(file), "--max-kv-size", "128")
    assert (code, out) == (0, "482913\n")
    assert "mlx-lm's rotating cache of 128 entries (no policy" in err and "full cache" not in err


def test_a_rotating_cache_that_mlx_lm_would_not_make(call, without_own_caches):
    """It passes over the option, or fails in the middle of a long prompt."""
    limit, asked = ["--max-kv-size", "512"], ["generate", "--prompt", LEAD]
    talk = ["chat", "--model", "demo"]
    other = ["--model", without_own_caches]
    for args, said in (
        ([*PLAIN, *limit], "no effect on llama models, since they make their own caches"),
        ([*talk, *limit], "limit the entries with --policy streaming_llm:budget=512"),
        ([*asked, *other, *limit, "--draft-model", "demo"], "no effect beside --draft-model"),
        ([*asked, *other, *limit, "--kv-bits", "8"], "--kv-bits can't quantise the cache of"),
    ):
        code, out, err = call(*args)
        assert (code, out) == (2, "") and err.count("\n") == 1 and said in err
    code, out, _ = call(*PLAIN, "--quiet", "--policy", "streaming_llm:budget=512")
    assert (code, out) == (0, "482913\n")


@pytest.mark.parametrize(
    "args, message",
    [
        (["--prompt", "x", "--snapkv", "topk=4"], "unknown snapkv option 'topk' (did you mean 'top_k'?); known: "),
        (["--prompt", "x", "--snapkv", "top_k=-1"], "snapkv option top_k must be a whole number of at least 0, got -1"),
        (["--prompt", "x", "--snapkv", "top_k=abc"], "top_k must be a whole number of at least 0, got 'abc'"),
        (["--prompt", "x", "--snapkv", "n_window=0"], "n_window must be a whole number"),
        (["--prompt", "x", "--snapkv", "top_k=4", "--policy", "snapkv"], "--snapkv and --policy both name a policy"),
        (["--prompt", ""], "the prompt is empty: give some text"),
        (["--prompt", " \\n "], "the prompt is empty: give some text"),
        ([], "nothing to read: give --prompt TEXT, --prompt-file FILE, or --prompt - for stdin"),
        (["--prompt", "-"], "the prompt is empty: give some text"),
        (["--prompt", "-", "--prompt-file", "-"], "can't both read standard input"),
        (["--prompt-file", "/no/such/file"], "--prompt-file /no/such/file: No such file or directory"),
        (["--prompt-file", "/dev/zero"], "--prompt-file /dev/zero is not UTF-8 text"),
        (["--prompt", "x", "--kv-bits", "8", "--kv-group-size", "128"], "--kv-group-size must be one of [32, 64]"),
        (["--prompt-file", "/"], "--prompt-file /: Is a directory"),
        (["--prompt-file", sys.executable], "is not UTF-8 text"),
        (["--prompt", "x", "--temp", "warm"], "Invalid value for '--temp'"),
        (["--prompt", "x", "--max-tokens", "0"], "Invalid value for '--max-tokens'"),
        (["--prompt", "x", "--kv-bits", "5"], "--kv-bits must be 2, 3, 4, 6 or 8, got 5"),
        (["--prompt", "x", "--adapter-path", "/no/adapters"], "--adapter-path /no/adapters: no adapter_config.json"),
        (["--prompt", "x", "--ignore-chat-template", "--system-prompt", "y"], "--system-prompt needs a chat template"),
        (["--prompt", "x", "--seed", "-1"], "Invalid value for '--seed'"),
        (["--prompt", "x", "--temp", "nan"], "Invalid value for '--temp'"),
        (["--prompt", "x", "--temp", "inf"], "Invalid value for '--temp'"),
        (["--prompt", "x", "--top-k", "100000000"], "--top-k must be below the vocabulary's 1536"),
        (["--prompt", "\udcff\udcfe"], "--prompt is not UTF-8 text"),
        (["--prompt", "x", "--system-prompt", "\udcff"], "the chat template or tokenizer failed"),
        (["--prompt-file", "~no-such-user/x"], "--prompt-file ~no-such-user/x: no such home folder"),
        (["--prompt-file", "x" * 5000], "File name too long"),
        (["--prompt", "x", "--no-such-option"], "No such option"),
        (["--prompt", "x", "--pipeline"], "start the command by mlx.launch, or drop it"),
        (["--prompt", "x", "--verbose", "no"], "--verbose must be True or False, got 'no'"),
        (["--prompt", "x", "--chat-template-config", "[1"], "--chat-template-config must be a JSON object"),
        (["--prompt", "x", "--chat-template-config", "[]"], "--chat-template-config must be a JSON object"),
        (["--prompt", "x", "--chat-template-config", '{"tokenize": 0}'], "can't set 'tokenize'"),
        (["--prompt", "x", "--extra-eos-token", "no such"], "'no such': this tokenizer has no such token"),
        (["--prompt", "x", "--extra-eos-token", "99999"], "has no such token"),
        (["--prompt", "x", "--min-tokens-to-keep", "99999"], "--min-tokens-to-keep must be below"),
        (["--prompt", "x", "--ignore-chat-template", "--prefill-response", "y"], "--prefill-response needs a chat"),
        (["--prompt", "x", "--snapkv", "top_k=0,n_sink=0,n_window=8,obs_window=4", "--kv-bits", "8",
          "--quantized-kv-start", "0"], "--quantized-kv-start is for the full cache"),
        (["--prompt", "x", "--xtc-threshold", "0.9"], "Invalid value for '--xtc-threshold'"),
        (["--prompt", "x", "--policy", "keydif"], "unknown policy 'keydif' (did you mean 'keydiff'?)"),
        (["--prompt", "x", "--policy", "keydiff:budget=0"], "budget must be a whole number of entries of at least 1"),
        (["--prompt", "x", "--policy", "keydiff:block=0"], "block must be a whole number of at least 1, got 0"),
        (["--prompt", "x", "--policy", "keydiff:anchr=mean"], "did you mean 'anchor'?"),
        (["--prompt", "x", "--policy", "snapkv then keydiff"], "only a policy with schedule=block can be followed"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line_and_exit_code_2(call, args, message):
    code, out, err = call("generate", "--model", "demo", *args)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1 and err.startswith("mlx-snapkv: ") and message in err


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda folder: None, "no such folder, and not the name of a Hugging Face repository"),
        (lambda folder: folder.mkdir(), "no config.json there"),
        (lambda folder: _model(folder, "{"), "config.json is no JSON: Expecting"),
        (lambda folder: _model(folder, ""), "config.json is no JSON: Expecting"),
        (lambda folder: _model(folder, "{}"), "config.json names no model_type"),
        (
            lambda folder: demo_with(folder, model_type="no_such_type"),
            "no_such_type not supported",
        ),
        (
            lambda folder: demo_with(folder, hidden_size=64),
            "weights don't fit its config.json: ValueError: .*shape",
        ),
        (lambda folder: _model(folder, '{"model_type": "llama"}'), "no weights there: model.safe"),
        (lambda folder: _model(folder, "[]"), "config.json is no JSON object"),
        (
            lambda folder: demo_with(folder, num_attention_heads=0),
            "config.json does not describe such a model: ZeroDivisionError",
        ),
        (
            lambda folder: demo_with(folder, num_hidden_layers="x"),
            "does not describe such a model",
        ),
        (lambda folder: _truncated(folder), "model.safetensors is damaged or cut short"),
        (lambda folder: _with_tokenizer(folder, None), "no tokenizer there: tokenizer.json"),
        (lambda folder: _with_tokenizer(folder, "hello"), "tokenizer.json is no JSON"),
        (lambda folder: _with_tokenizer(folder, "{}"), "its tokenizer can't be read"),
        (
            lambda folder: _template(folder, "{{ raise_exception('System role not supported') }}"),
            "the chat template or tokenizer failed: TemplateError: System role not supported",
        ),
        (lambda folder: _template(folder, "{% for %}"), "the chat template or tokenizer failed"),
        (
            lambda folder: _template(folder, "{# nothing #}"),
            "the chat template made an empty prompt",
        ),
    ],
)
def test_models_that_cannot_be_loaded(call, tmp_path, make, message):
    folder = tmp_path / "model"
    make(folder)
    code, out, err = call("generate", "--model", str(folder), "--prompt", "x")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1 and re.search(message, err)


def _model(folder, config):
    folder.mkdir()
    (folder / "config.json").write_text(config)


def _truncated(folder):
    demo_with(folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])


def _with_tokenizer(folder, text):
    demo_with(folder)
    (folder / "tokenizer.json").unlink()
    if text is not None:
        (folder / "tokenizer.json").write_text(text)


def _template(folder, template):
    demo_with(folder)
    change(folder / "tokenizer_config.json", chat_template=template)


def test_names_no_model_can_have(call):
    for name in ("~no-such-user/model", "x" * 5000, "a/b/c", "\0"):
        code, out, err = call("generate", "--model", name, "--prompt", "x")
        assert (code, out) == (2, "") and err.count("\n") == 1


def test_output_that_cannot_be_written_is_one_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*MODULE, *PLAIN, "--quiet"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (done.returncode, done.stderr) == (1, "mlx-snapkv: No space left on device\n")


def test_a_conflict_with_mlx_lms_cache_options(call, without_own_caches, tmp_path):
    file = tmp_path / "document.txt"
    file.write_text(LEAD * 10)
    args = ["generate", "--model", "demo", "--prompt-file", str(file)]
    args += ["--snapkv", "top_k=4,n_sink=0,n_window=32"]
    code, out, err = call(*args, "--max-kv-size", "64", "--model", without_own_caches)
    assert (code, out) == (2, "") and err.count("\n") == 1 and "or the policy" in err
    code, out, err = call(*args, "--kv-bits", "8", "--kv-group-size", "128")
    assert (code, out) == (2, "") and err.count("\n") == 1 and "must be one of [32, 64]" in err
    assert call(*args, "--kv-bits", "8", "--max-tokens", "5")[0] == 0


def test_help_version_and_no_command(call):
    assert call("--version") == (0, "0.1.0\n", "")
    code, out, _ = call()
    assert code == 0 and "generate" in out and "demo" in out
    code, out, _ = call("generate", "--help")
    assert code == 0 and "--prefill-step-size" in out and "mlx-snapkv generate --model demo" in out
    code, _, err = call("nonsense")
    assert (code, err) == (2, "mlx-snapkv: No such command 'nonsense'.\n")


def test_the_share_of_drafted_tokens_is_told(call):
    args = [*PLAIN, "--snapkv", "top_k=4,n_sink=2,n_window=16,obs_window=8,lookahead=1"]
    drafted = [*args, "--draft-model", "demo", "--num-draft-tokens", "2"]
    code, out, err = call(*drafted)
    assert (code, out) == call(*args)[:2]
    assert re.search(r"generation [\d.]+ tokens/s \(\d+% of the tokens drafted\), peak", err)
    rate = json.loads(call(*drafted, "--json")[1])["acceptance_rate"]
    assert 0 < rate < 1


def test_draft_models_that_cannot_be_used(call, tmp_path):
    folder = demo_with(tmp_path / "draft")
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["model"]["vocab"]["another word"] = 100_000
    file.write_text(json.dumps(tokenizer))
    for model, draft, message in (
        ("demo-qwen3-next", "demo", "the main model's (qwen3_next) can't"),
        ("demo", "./nowhere", "--draft-model ./nowhere: no such folder"),
        ("demo", str(folder), "a draft model needs the model's own tokenizer"),
    ):
        code, out, err = call(*PLAIN, "--model", model, "--draft-model", draft)
        assert (code, out) == (2, "") and message in err and err.count("\n") == 1


RECALLED = ["--snapkv", "top_k=20,n_sink=4,n_window=24,obs_window=16,lookahead=0"]


@pytest.fixture(scope="module")
def asked(demo_llama, tmp_path_factory):
    """A file of 1,500 tokens, a question about it, and the answer."""
    text, facts = make_haystack(demo_llama[1], random.Random(0), 4, 1500)
    path = tmp_path_factory.mktemp("recall") / "story.txt"
    path.write_text(text)
    command = ["generate", "--model", "demo", "--prompt-file", str(path), "-m", "12"]
    return [*command, "--prompt", facts[0].question], facts[0].value


@pytest.mark.parametrize(
    "options, closing",
    [
        (
            ["--memory", "recall"],
            r" read by every token, KV memory [^|]*, all \d+ in memory as well ",
        ),
        (
            ["--memory", "recall:file:8bit", "--refresh", "turn"],
            r" entries kept, [^|]*, all \d+ in files in 8 bits as well ",
        ),
        (
            ["--memory", "recall", "--verify", "all"],
            r", \d+% of the tokens drafted, [\d.]+ times as fast as the full cache ",
        ),
    ],
)
def test_an_answer_that_recalls(call, asked, options, closing):
    command, value = asked
    code, out, err = call(*command, *RECALLED, *options)
    assert code == 0 and re.search(rf"{closing}\| prompt", err.splitlines()[-1])
    if "--verify" in options:
        assert out == value + "\n"
        code, out, err = call(*command, *RECALLED, *options, "--json", "--quiet")
        verified = json.loads(out)["compression"]["verified"]
        assert verified["tokens"] > 0 and err == ""


@pytest.mark.parametrize(
    "options, message",
    [
        (["--verify", "all"], "--verify all asks entries that --memory drop does not keep"),
        (["--verify", "maybe", "--memory", "recall"], "verify must be all, got 'maybe'"),
        (["--memory", "recall:2bit"], "or recall:file:4bit, got 'recall:2bit'"),
        (["--verify", "all", "--memory", "recall:file"], "must be in memory"),
        (
            ["--memory", "recall", "--refresh", "never"],
            "refresh must be token or turn, got 'never'",
        ),
    ],
)
def test_what_can_not_be_recalled_is_one_line(call, asked, options, message):
    code, out, err = call(*asked[0], *RECALLED, *options)
    assert (code, out) == (2, "") and message in err.splitlines()[-1]


def test_a_saved_text_is_asked_with_every_entry_at_hand(call, asked, tmp_path):
    (command, value), path = asked, tmp_path / "story.safetensors"
    question = command[command.index("--prompt") + 1]
    text = ["--prompt-file", command[command.index("--prompt-file") + 1]]
    assert call("cache-prompt", "--model", "demo", *text, "-o", str(path))[0] == 0
    options = ["--prompt-cache-file", str(path), "--prompt", question, *RECALLED, "-m", "12"]
    ways = ["--memory", "recall"]
    code, out, _ = call("generate", "--model", "demo", *options, *ways)
    assert (code, out) == (0, value + "\n")
