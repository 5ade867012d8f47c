"""The flags of generate and chat: mlx-lm's, and the same in both."""

import importlib

import pytest
import typer
from mlx_lm import chat as mlx_chat

from mlx_snapkv.cli import app

mlx_generate = importlib.import_module("mlx_lm.generate")

LEFT_OUT = {
    "--image",  # prompts are text
    "--use-default-chat-template",  # mlx-lm declares it and reads it nowhere
}
# What is about one prompt and its answer, and no conversation.
ONE_PROMPT = {
    "--prompt", "-p", "--prompt-file", "--prompt-cache-file", "--prefill-response",
    "--ignore-chat-template", "--draft-model", "--num-draft-tokens", "--verbose", "--json",
}  # fmt: skip
ASKED = [*"generate --model demo -q -m 6 -p".split(), "The access code of the amber falcon?"]


def ours(name):
    command = typer.main.get_command(app.app).commands[name]
    return {flag for option in command.params for flag in option.opts} | {"-h", "--help"}


def test_both_have_mlx_lms_flags_and_the_same():
    for name, module in (("generate", mlx_generate), ("chat", mlx_chat)):
        theirs = set(module.setup_arg_parser()._option_string_actions)
        assert theirs - LEFT_OUT <= ours(name), name
    assert ours("generate") - ours("chat") == ONE_PROMPT
    assert not ours("chat") - ours("generate")


@pytest.mark.parametrize("name", ["", "generate", "chat", "cache-prompt", "models", "eval"])
def test_h_is_help(call, name):
    assert call(*name.split(), "-h") == call(*name.split(), "--help")


def test_flags_that_leave_a_greedy_answer_as_it_is(call):
    answer = call(*ASKED)
    for flags in (
        ["--min-p", "0.1", "--top-k", "5", "--min-tokens-to-keep", "2", "--xtc-probability", "0.5"],
        ["--verbose", "F"],
        ["--chat-template-config", '{"enable_thinking": false}'],
        ["--extra-eos-token", "1"],
        ["--quantized-kv-start", "9000", "--kv-bits", "8"],
        ["-qa"],
    ):
        assert call(*ASKED, *flags) == answer
    assert answer[0] == 0 and answer[1].strip()


def test_flags_that_change_the_answer(call, demo_llama):
    _, plain, _ = call(*ASKED)
    *_, last = demo_llama[1].encode(f" {plain.strip()}", add_special_tokens=False)
    assert call(*ASKED, "--extra-eos-token", str(last)) == (0, plain.replace(".", ""), "")
    assert call(*ASKED, "--prefill-response", "It was cold at the") != (0, plain, "")
    answers = {call(*ASKED, "--temp", "3", "--top-k", "1", "--seed", str(n))[1] for n in range(3)}
    assert answers == {plain}  # of one token there is nothing to choose
    bits = ["--kv-bits", "2", "--kv-group-size", "32", "-m", "30"]
    assert call(*ASKED, *bits, "--quantized-kv-start", "0") != call(*ASKED, *bits)
    sampled = [*ASKED, "--temp", "3", "--seed"]
    assert call(*sampled, "7") == call(*sampled, "7") != call(*sampled, "8")
