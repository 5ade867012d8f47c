"""The evaluation loop: both settings, continued runs, independent questions and methods, and the tables."""

import itertools
from dataclasses import replace
from functools import partial

import mlx.core as mx
import pytest
from evaluation import answering
from evaluation.answering import forcing, run
from evaluation.scores import summarise, tables
from evaluation.tasks import needle, suite

from mlx_snapkv import generate_step, stream_generate
from mlx_snapkv.measure.methods import ANSWER_SETTINGS, KNOWN, LATER, Method
from mlx_snapkv.measure.records import Results
from mlx_snapkv.planning.settings import setting_named

SNAPKV = "snapkv:budget=48,n_window=16,obs_window=16,lookahead=0,on_full=slide"
AHEAD = "snapkv:budget=12,n_sink=0,n_window=4,obs_window=8,lookahead=8"
SPARSE = "sparse:budget=64,n_window=16,read_top_k=96,when=always"


def method(text):
    return Method(setting_named(text))


METHODS = {
    "full": Method(),
    "snapkv": method(SNAPKV),
    "ahead": method(AHEAD),
    "sparse": method(SPARSE),
}
NAMES = {method.name: short for short, method in METHODS.items()}


@pytest.fixture(scope="module")
def asked(demo_tasks):
    """Return the model, a data set with one document for each of two tasks, and the records of a run."""
    model, tokenizer = demo_tasks
    dataset = suite(tokenizer, ["single", "two-links"], [768], 1, 3)
    return model, dataset, run(model, dataset, [*METHODS.values()], ANSWER_SETTINGS, Results({}))


def test_the_tables_show_that_sparse_attention_answers_what_snapkv_loses(asked):
    """A chain of links needs entries that no query votes for. Sparse attention still finds them."""
    *_, records = asked
    found = {(NAMES[s["method"]], s["setting"]): s for s in summarise(records)}
    for setting in ANSWER_SETTINGS:
        assert found["full", setting]["score"] >= 5 / 6
        sparse = found["sparse", setting]
        assert found["snapkv", setting]["score"] < sparse["score"] and sparse["score"] >= 4 / 6
        assert found["snapkv", setting]["difference"]["mean"] < 0
    assert found["snapkv", LATER]["score"] <= found["snapkv", KNOWN]["score"]
    assert found["snapkv", KNOWN]["entries"] == 48
    assert found["snapkv", KNOWN]["kv_bytes"] < found["full", KNOWN]["kv_bytes"] / 8
    assert {s["uncompressed"] for s in found.values()} == {0}


@pytest.mark.parametrize("name", ["snapkv", "ahead", "sparse"])
def test_known_questions_get_stream_generates_answers(asked, name):
    model, dataset, records = asked
    chosen, questions = METHODS[name], dataset.make(dataset.places[0]).questions
    wanted = {"method": chosen.name, "setting": KNOWN, "task": "single"}
    said = [r["answer"] for r in records if r | wanted == r]
    for question, answer in zip(questions, said, strict=True):
        responses = stream_generate(
            model, dataset.tokenizer, question.prompt, 60, policy=chosen.policy
        )
        assert answer == "".join(response.text for response in responses)


def test_tables_say_how_much_of_the_answers_came_before_the_compression(asked):
    """If the question is known, the lookahead and one more token are generated before the compression.

    Otherwise documents are compressed before the question arrives. Sparse attention reads a later question as a turn.
    """
    _, _, records = asked
    most = {"full": 0, "snapkv": 2, "ahead": 9, "sparse": 2}
    for record in records:
        name, known = NAMES[record["method"]], record["setting"] == KNOWN
        first = most[name] if known or name == "sparse" else 0
        assert record["before"] == min(record["answer_tokens"], first), (name, record["setting"])
    known, _, later, _ = tables(summarise(records))
    column = known.columns.index("before compression")
    shares = [row[column] for row in known.rows]
    assert shares[0] == "" and all(share.endswith("%") for share in shares[1:])
    assert int(shares[2][:-1]) > int(shares[1][:-1]) > 0 and later.rows[1][column] == "0%"
    assert "Before compression: the share" in known.remark


def test_a_run_continues_where_it_stopped(asked, tmp_path):
    """Only the missing answers are generated: the last two, and one in the middle."""
    model, dataset, records = asked
    with Results(dataset.setting, tmp_path / "r.jsonl") as results:
        for record in [r for i, r in enumerate(records[:-2]) if i != 7]:
            results.add(record)
    for _ in range(2):  # the second run has nothing left to ask
        finished = []
        count = partial(finished.append, 1)
        with Results(dataset.setting, tmp_path / "r.jsonl") as results:
            again = run(model, dataset, [*METHODS.values()], ANSWER_SETTINGS, results, count)
        assert again == records and len(finished) == 2
        assert len((tmp_path / "r.jsonl").read_text().splitlines()) == 1 + len(records)


def test_an_uncompressed_prompt_never_counts_as_the_methods(demo_llama):
    model, tokenizer = demo_llama
    dataset = needle(tokenizer, [1024], n_depths=2)
    methods = [Method(), method("random:budget=3%"), method("snapkv:top_k=2000")]
    records = run(model, dataset, methods, [KNOWN], Results({}))
    full, random, nothing = summarise(records)
    assert (full["score"], full["asked"]) == (1, 2)
    assert random["score"] < 1 and random["entries"] == 30 and random["uncompressed"] == 0
    assert random["kv_bytes"] < full["kv_bytes"]
    (known,) = tables([full, random, nothing])
    assert [row[2] for row in known.rows] == ["100.0", "0.0", "not compressed"]
    assert f"Not compressed: 2 of 2 prompts of {methods[2].name} (the prompt's 10" in known.remark


def test_the_first_tokens_of_an_answer_can_be_given(demo_tasks):
    """The reference is generate_step with a sampler that returns these tokens. The recorded answer excludes them."""
    model, tokenizer = demo_tasks
    dataset = suite(tokenizer, ["single"], [768], 1, 1)
    document = dataset.make(dataset.places[0])
    begun = tokenizer.encode("The papers are many. The answer is", add_special_tokens=False)
    limit = len(begun) + 12
    (question,) = (replace(q, begun=begun, max_tokens=limit) for q in document.questions)
    begins = replace(dataset, make=lambda place: replace(document, questions=[question]))
    known, later = (
        run(model, begins, [*METHODS.values()], [s], Results({})) for s in (KNOWN, LATER)
    )
    for chosen, record in zip(METHODS.values(), known, strict=True):
        steps = generate_step(
            mx.array(question.prompt),
            model,
            max_tokens=limit,
            policy=chosen.policy,
            sampler=forcing(begun),
        )
        tokens = [token for token, _ in steps][len(begun) :]
        ended = itertools.takewhile(lambda token: token not in tokenizer.eos_token_ids, tokens)
        assert record["answer"] == tokenizer.decode(list(ended)), chosen.name
    for record in later:
        assert "papers" not in record["answer"] and record["answer_tokens"] <= limit


@pytest.mark.parametrize("setting", [KNOWN, LATER])
def test_sparse_attention_after_dense_prefill_starts_from_the_shared_reading(demo_tasks, setting):
    """The reference reads each whole prompt on its own."""
    model, tokenizer = demo_tasks
    dataset = suite(tokenizer, ["two-links"], [768], 1, 2)
    chosen = method("sparse:budget=64,n_window=16")
    records = run(model, dataset, [chosen], [setting], Results({}))
    questions = dataset.make(dataset.places[0]).questions
    for question, record in zip(questions, records, strict=True):
        steps = generate_step(
            mx.array(question.prompt), model, max_tokens=question.max_tokens, policy=chosen.policy
        )
        tokens = itertools.takewhile(
            lambda token: token not in tokenizer.eos_token_ids, (token for token, _ in steps)
        )
        assert record["answer"].strip() == tokenizer.decode(list(tokens)).strip()
        assert record["entries"] == 64


def test_methods_of_sparse_attention_share_a_reading_of_the_document(demo_tasks, monkeypatch):
    """Methods that share a prefill give the same answers as methods that read the document on their own."""
    model, tokenizer = demo_tasks
    dataset = suite(tokenizer, ["two-links"], [768], 1, 2)
    methods = [method(f"sparse:budget={n},n_window=16,read_top_k=96") for n in (64, 96)]
    alone = [run(model, dataset, [each], [LATER], Results({})) for each in methods]
    read = []
    whole = answering.prefill
    monkeypatch.setattr(answering, "prefill", lambda *args: read.append(args[2]) or whole(*args))
    together = run(model, dataset, methods, [LATER], Results({}))
    assert len(read) == 1 and together == [record for records in alone for record in records]
