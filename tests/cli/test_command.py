"""Options that would do nothing, and sentences that name what was typed."""

import pytest

from mlx_snapkv.cli.spelling import in_flags

ASK = ["generate", "--model", "demo", "-q", "-m", "2", "--prompt", "x"]
SERVE = ["serve", "--model", "demo", "--port", "0"]


@pytest.mark.parametrize(
    "args, flag, other",
    [
        ([*ASK, "--kv-group-size", "64"], "--kv-group-size", "--kv-bits"),
        ([*ASK, "--quantized-kv-start", "0"], "--quantized-kv-start", "--kv-bits"),
        ([*ASK, "--num-draft-tokens", "2"], "--num-draft-tokens", "--draft-model"),
        ([*ASK, "--policy", "snapkv", "--memory", "recall", "--verify", "all",
          "--verify-below", "0.9"], "--verify-below", "--verify unsure"),
        ([*ASK, "--memory", "recall", "--store-dir", "."], "--store-dir", "--memory recall:file"),
        ([*SERVE, "--prefix-dir-bytes", "4GB"], "--prefix-dir-bytes", "--prefix-dir"),
        (["eval", "suite", "--verify-below", "0.9"], "--verify-below", "--verify unsure"),
    ],
)  # fmt: skip
def test_an_option_that_would_do_nothing_is_refused(call, args, flag, other):
    code, out, err = call(*args)
    said = f"{flag} does nothing without {other}: give that, or drop {flag}"
    assert (code, out, err) == (2, "", f"mlx-snapkv: {said}\n")


def test_a_chat_may_need_it_later(call):
    more = ["--store-dir", ".", "--verify-below", "0.9"]
    assert call("chat", "--model", "demo", *more, stdin=b"/quit\n")[0] == 0


@pytest.mark.parametrize(
    "args, said",
    [
        (["--memory", "foo"], "--memory must be drop, recall, "),
        (["--policy", "h2o", "--memory", "recall"], "--memory recall needs a policy that chooses "),
        (["--far", "pull"], "--far pull needs a policy that evicts "),
        (["--policy", "snapkv", "--verify", "unsure"], "give --memory recall\n"),
        (["--policy", "snapkv:n_sink=-1"], "snapkv option n_sink must be "),
    ],
)
def test_a_sentence_names_what_was_typed(call, args, said):
    code, out, err = call(*ASK, *args)
    assert (code, out) == (2, "") and said in err


def test_what_only_looks_like_an_argument_stays():
    for text in (
        "a/memory=recall.txt is no text",
        "x-memory=recall",
        "kv_bits.txt: there is no such file",
        "there is no memory left",
    ):
        assert in_flags(text) == text
