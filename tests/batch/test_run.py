"""Requests that fail on the way, and files of answers that are not as they were left."""

import json

import pytest
from batch_file_helpers import COMPLETIONS, line, read, said, write
from tiny_models import make_llama

from mlx_snapkv import SnapKVError
from mlx_snapkv.batch.files import AnswersFile, RequestsFile
from mlx_snapkv.batch.run import Run

POLICY = "snapkv:top_k=8,n_sink=2,n_window=8,obs_window=4,lookahead=4"
EVIL = 1000  # a token


class Failing(type(make_llama())):
    """Raises when it reads a certain token."""

    __module__ = "mlx_lm.models.llama"  # which its type is told by

    def __call__(self, inputs, cache=None):
        if EVIL in inputs.reshape(-1).tolist():
            raise RuntimeError("out of memory\nsomewhere")
        return super().__call__(inputs, cache)


def ids(custom_id, *more, n=40):
    prompt = [*range(10, 10 + n), *more]
    return line(custom_id, COMPLETIONS, prompt=prompt, max_tokens=9, logit_bias={"1": -100})


def answered(model, tokenizer, lines, folder, policy):
    path, about = folder / "a.jsonl", {"policy": policy}
    path.unlink(missing_ok=True)
    answers = AnswersFile(path, {})
    run = Run(model, tokenizer, answers, about, "tiny", about, concurrency=2)
    with answers, write(folder / "r.jsonl", lines).open("rb") as stream:
        run.answer(RequestsFile(stream))
    return read(path)


@pytest.fixture(scope="module")
def failing(demo_llama):
    model = make_llama(vocab_size=1536)
    model.__class__ = Failing
    return model, demo_llama[1]


def test_a_request_that_fails_ends_alone(failing, tmp_path):
    lines = [ids("a"), ids("bad", EVIL), ids("b", 5), ids("c", EVIL, 5), ids("d", 7)]
    found = answered(*failing, lines, tmp_path, POLICY)
    for name, number in (("bad", 2), ("c", 4)):
        sentence = f"line {number}: RuntimeError: out of memory"
        assert said(found[name]) == {"code": "failed", "message": sentence, "line": number}
    good = [request for request in lines if request["custom_id"] in "abd"]
    expected = answered(*failing, good, tmp_path, POLICY)
    assert {n: said(r) for n, r in expected.items()} == {n: said(found[n]) for n in "abd"}


def test_without_a_policy_those_beside_it_end_too_and_the_run_goes_on(failing, tmp_path):
    lines = [ids("a"), ids("bad", EVIL), ids("b", 5), ids("c", 7)]
    found = answered(*failing, lines, tmp_path, None)
    assert {name for name, record in found.items() if record["error"]} == {"a", "bad"}
    expected = answered(*failing, [ids("b", 5), ids("c", 7)], tmp_path, None)
    assert {n: said(r) for n, r in expected.items()} == {n: said(found[n]) for n in "bc"}


def test_a_damaged_line_is_named_and_nothing_is_lost(failing, tmp_path):
    path = tmp_path / "a.jsonl"
    answered(*failing, [ids("a"), ids("b")], tmp_path, POLICY)
    whole = path.read_bytes()
    first, second, _ = whole.split(b"\n")
    for data, words in [
        (first[:90] + b"\n" + second + b"\n", "did not write it"),
        (first + b"\n" + second[:90] + b"\n" + second + b"\n", "line 2 is damaged: delete"),
        (whole + b"my notes", "line 3 is damaged"),
        (b"my notes", "did not write it"),
        (b"{}\n", "did not write it"),
        (json.dumps([1]).encode() + b"\n", "did not write it"),
    ]:
        path.write_bytes(data)
        with pytest.raises(SnapKVError, match=words):
            AnswersFile(path, {})
        assert path.read_bytes() == data
    for rest in (b"", b'{"i', b"\0" * 4096, second[:-1], second):
        path.write_bytes(first + b"\n" + rest)
        with AnswersFile(path, {}) as answers:
            assert (answers.n_answered, answers.n_errors) == (1, 0)
        assert path.read_bytes() == first + b"\n"
