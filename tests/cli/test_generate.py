import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from command_lines import LEAD, MODULE, PLAIN, RAW
from mlx_lm import chat as mlx_chat
from model_folders import demo_with

from mlx_snapkv.cli import app
from mlx_snapkv.cli.generate import FIGURES

mlx_generate = importlib.import_module("mlx_lm.generate")
INSTALLED = [str(Path(sys.executable).with_name("mlx-snapkv"))]
LEFT_OUT = {
    "--image",  # prompts are text
    "--use-default-chat-template",  # mlx-lm declares it and reads it nowhere
}
FEW = "top_k=20,n_sink=4,n_window=24"
# Options that make sense for one prompt and not for a conversation.
ONE_PROMPT = {
    "--prompt", "-p", "--prompt-file", "--prompt-cache-file", "--prefill-response",
    "--ignore-chat-template", "--draft-model", "--num-draft-tokens", "--verbose", "--json",
    "--json-schema",
}  # fmt: skip


def test_the_answer_goes_to_stdout_and_the_figures_to_stderr():
    """This runs the installed command. `python -m mlx_snapkv` is tested in test_streams.py."""
    command = INSTALLED if Path(INSTALLED[0]).exists() else MODULE
    done = subprocess.run([*command, *PLAIN], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "482913\n")
    assert re.fullmatch(
        r"\d+ prompt tokens, full cache \(no policy; --policy auto chooses one where it helps\) \| "
        r"prompt [\d.]+ tokens/s, generation [\d.]+ tokens/s, peak memory [\d.]+ GB",
        done.stderr.splitlines()[-1],
    )


def test_compression_is_reported(call, tmp_path):
    file = tmp_path / "document.txt"
    file.write_text(("It was cold at the market. " * 40) + LEAD)
    asked = ["--prompt-file", str(file), "--snapkv", "top_k=16,n_sink=4,n_window=32,lookahead=4"]
    code, out, err = call(*RAW, *asked, "--json")
    result = json.loads(out)
    assert code == 0 and result["model"] == "demo" and result["text"] == "482913"
    assert set(result) == {"model", "text", "compression", "peak_memory_gb", *FIGURES}
    assert result["compression"]["entries_kept"] == [52, 52, 52]
    assert result["compression"]["reason"] is None
    assert re.search(
        r"prompt tokens, 52 entries kept, KV memory [\d.]+ [kM]B → [\d.]+ kB \(float32\) \| prompt",
        err.splitlines()[-1],
    )


def test_an_answer_obeys_a_schema(call, tmp_path):
    schema = {"type": "object", "properties": {"code": {"type": "integer"}}, "required": ["code"]}
    text = json.dumps(schema | {"additionalProperties": False})
    (file := tmp_path / "schema.json").write_text(text)
    for given in (text, str(file)):
        code, out, _ = call(*RAW, "--prompt", LEAD, "--json-schema", given, "-q", "-m", "40")
        assert code == 0 and isinstance(json.loads(out)["code"], int)
    code, out, _ = call(*PLAIN, "--json-schema", text, "--json", "-m", "40")
    assert code == 0 and list(json.loads(json.loads(out)["text"])) == ["code"]


def test_stdin_and_file_make_one_prompt(call, tmp_path):
    first, rest = LEAD.split(" It was cold. ")
    file = tmp_path / "fact.txt"
    file.write_text(first)
    expected = call(*RAW, "-q", "--prompt", f"{first}\n\n{rest}")
    assert expected[0] == 0 and "482913" in expected[1]
    assert call(*RAW, "-q", "--prompt", "-", stdin=f"{first}\n\n{rest}".encode()) == expected
    assert call(*RAW, "-q", "--prompt-file", str(file), "--prompt", rest) == expected
    assert call(*RAW, "-q", "--prompt-file", "-", "-p", rest, stdin=first.encode()) == expected


def test_a_prompt_is_taken_as_typed(call, tmp_path):
    typed = r"In C:\new\table, \nabla is a \texttt{name}. " + LEAD
    file = tmp_path / "typed.txt"
    file.write_text(typed)
    found = {}
    for source, text in (("--prompt", typed), ("--prompt-file", str(file))):
        code, out, _ = call(*RAW, "--json", source, text)
        assert code == 0
        found[source] = json.loads(out)["prompt_tokens"], json.loads(out)["text"]
    assert found["--prompt"] == found["--prompt-file"]


def test_max_kv_size_makes_a_rotating_cache(call, tmp_path):
    """Only model types that leave cache creation to mlx-lm accept --max-kv-size."""
    model = demo_with(tmp_path / "model", model_type="seed_oss", attention_out_bias=False)
    file = tmp_path / "document.txt"
    file.write_text(("It was cold at the market. " * 200) + LEAD)
    asked = [*RAW, "--model", str(model), "--prompt-file", str(file), "--max-kv-size", "128"]
    code, out, err = call(*asked)
    assert (code, out) == (0, "482913\n")
    assert "mlx-lm's rotating cache of 128 entries (no policy" in err and "full cache" not in err


def test_version_help_and_the_command_alone(call):
    assert call("--version") == (0, "0.1.0\n", "")
    code, out, _ = call()
    assert code == 0 and "generate" in out and "demo" in out
    code, out, _ = call("generate", "--help")
    assert code == 0 and "--prefill-step-size" in out and "mlx-snapkv generate --model demo" in out
    assert call("generate", "-h") == (code, out, "") and call("eval", "-h") == call("eval")


def test_the_closing_line_has_the_share_of_drafted_tokens(call):
    args = [*PLAIN, "--snapkv", "top_k=4,n_sink=2,n_window=16,obs_window=8,lookahead=1"]
    code, out, err = call(*args, "--draft-model", "demo", "--num-draft-tokens", "2")
    assert (code, out) == call(*args)[:2]
    assert re.search(r"generation [\d.]+ tokens/s \(33% of the tokens were drafted\), peak", err)


def ours(name):
    command = typer.main.get_command(app.app).commands[name]
    return {flag for option in command.params for flag in option.opts} | {"-h", "--help"}


def test_generate_and_chat_have_all_flags_of_mlx_lm_and_the_same_flags():
    for name, module in (("generate", mlx_generate), ("chat", mlx_chat)):
        theirs = set(module.setup_arg_parser()._option_string_actions)
        assert theirs - LEFT_OUT <= ours(name), name
    assert ours("generate") - ours("chat") == ONE_PROMPT
    assert not ours("chat") - ours("generate")


ASKED = [*"generate --model demo -q -m 6 -p".split(), "The access code of the amber falcon?"]
LOUD = [word for word in ASKED if word != "-q"]


def test_flags_that_leave_a_greedy_answer_as_it_is(call):
    answer = call(*ASKED)
    sampling = "--min-p 0.1 --top-k 5 --min-tokens-to-keep 2 --xtc-probability 0.5 -qa --verbose F"
    others = "--extra-eos-token 1 --quantized-kv-start 9000 --kv-bits 8 --chat-template-config"
    for flags in (sampling.split(), [*others.split(), '{"enable_thinking": false}']):
        assert call(*ASKED, *flags) == answer
    assert answer[0] == 0 and answer[1].strip()


@pytest.mark.parametrize(
    "command",
    [
        [*LOUD, "--quantized-kv-start", "0"],
        [*LOUD, "--snapkv", "top_k=1,n_sink=1,n_window=1"],
        ["plan", "--model", "demo", "--context", "8k"],
    ],
)
@pytest.mark.parametrize(("bits", "is_risky"), [("8", False), ("6", True), ("2", True)])
def test_a_note_says_that_few_bits_can_make_answers_useless(call, command, bits, is_risky):
    code, _, err = call(*command, "-m", "2", "--kv-bits", bits, "--kv-group-size", "32")
    assert code == 0
    note = f"note: with --kv-bits {bits}, answers of some models are useless; --kv-bits 8 changes"
    assert (note in err.replace("\n", " ")) == is_risky and err.count("note:") == is_risky


def test_flags_that_change_the_answer(call, demo_llama):
    _, plain, _ = call(*ASKED)
    *_, last = demo_llama[1].encode(f" {plain.strip()}", add_special_tokens=False)
    assert call(*ASKED, "--extra-eos-token", str(last)) == (0, plain.replace(".", ""), "")
    assert call(*ASKED, "--prefill-response", "It was cold at the")[1].startswith("square.")
    assert (
        call(*ASKED, "--temp", "3", "--top-k", "1", "--seed", "1")[1] == plain
    )  # one possible token
    bits = ["--kv-bits", "2", "--kv-group-size", "32", "-m", "30"]
    assert call(*ASKED, *bits, "--quantized-kv-start", "0") != call(*ASKED, *bits)
    note = "note: --kv-bits quantises a full cache only from 5,000 tokens on"
    assert note in call(*LOUD, *bits)[2]
    assert note in call(*LOUD, *bits, "--snapkv", "top_k=4096")[2]  # the prompt fits the budget
    _, _, said = call("chat", "--model", "demo", *bits[:4], stdin=b"")
    assert note in said
    bits = [*bits[:4], "--quantized-kv-start", "0"]
    notes = call("chat", "--model", "demo", *bits, stdin=b"")[2].split("note: ")[1:]
    assert [note[:17] for note in notes] == ["with --kv-bits 2,"]
    sampled = [*ASKED, "--temp", "3", "--seed"]
    assert call(*sampled, "7") == call(*sampled, "7") != call(*sampled, "8")
