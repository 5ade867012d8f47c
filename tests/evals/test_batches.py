"""Evaluations in batches keep the records of those that ask one question after the other."""

import mlx.core as mx
import pytest
from model_configs import make_model
from tiny_models import make_llama

from mlx_snapkv.batch.batchable import is_batchable
from mlx_snapkv.cli.asking import BatchSize
from mlx_snapkv.errors import SnapKVError
from mlx_snapkv.evals import asking, batches, score_tables
from mlx_snapkv.evals.answers import answers
from mlx_snapkv.evals.asking import FULL, KEYS, SETTINGS, Paper, Way
from mlx_snapkv.evals.grid import cells
from mlx_snapkv.evals.needle import Needle
from mlx_snapkv.evals.prompt import Prompt
from mlx_snapkv.evals.results import Results
from mlx_snapkv.evals.run import contenders, run
from mlx_snapkv.evals.suite import PAGE, Suite
from mlx_snapkv.policies import resolve_policy

SNAPKV = "snapkv:budget=64,n_sink=4,n_window=32,min_ctx=0"
KEYDIFF = "keydiff:budget=25%,block=64"
POLICIES = [SNAPKV, f"{SNAPKV},lookahead=0", KEYDIFF, f"{KEYDIFF} then {SNAPKV}", "snapkv"]
GRID = cells([320, 512], 2, 1)
SECONDS = ("first_seconds", "selection_seconds")


def timeless(records):
    return [{key: r[key] for key in r if key not in SECONDS} for r in records]


@pytest.fixture(scope="module")
def one_by_one(demo_model):
    model, tokenizer = demo_model
    return run(model, tokenizer, Needle(tokenizer), GRID, contenders(POLICIES), Results({}))


@pytest.mark.parametrize("batch_size", [4, 100])
def test_facts_hidden_in_documents(demo_model, one_by_one, batch_size):
    model, tokenizer = demo_model
    given = Needle(tokenizer), GRID, contenders(POLICIES), Results({})
    assert run(model, tokenizer, *given, batch_size=batch_size) == one_by_one
    assert len({r["kv_bytes"] for r in one_by_one}) > 4


def test_an_interrupted_batch_goes_on_where_it_was(demo_model, one_by_one, tmp_path):
    model, tokenizer = demo_model
    asked = []

    def stop_at_ten():
        asked.append(1)
        if len(asked) == 10:
            raise KeyboardInterrupt

    def again(on_answer):
        results = Results({"task": "needle"}, tmp_path / "r.jsonl")
        given = Needle(tokenizer), GRID, contenders(POLICIES), results, on_answer
        return run(model, tokenizer, *given, batch_size=4)

    with pytest.raises(KeyboardInterrupt):
        again(stop_at_ten)
    assert again(lambda: asked.append(1)) == one_by_one
    assert len(asked) == len(one_by_one)
    assert (tmp_path / "r.jsonl").read_text().count("\n") == 1 + len(one_by_one)


def ways():
    recalled = {"memory": "recall", "verify": "unsure"}
    dropping = [Way(text, resolve_policy(policy=text)) for text in (SNAPKV, KEYDIFF)]
    return [Way(FULL), *dropping, Way("recall", resolve_policy(policy=SNAPKV), recalled)]


def ask(model, papers, batch_size, given=None):
    results = Results({}, None, KEYS)
    for record in given or []:
        results.add(record)
    return asking.run(model, papers, ways(), SETTINGS, results, batch_size=batch_size)


@pytest.fixture(scope="module")
def suite_asked(demo_model):
    """Two documents, and the records of their questions one at a time."""
    model, tokenizer = demo_model
    suite = Suite(tokenizer, ["single", "two-links"], [512], 1, 2)
    return model, suite, ask(model, suite, 1)


def test_questions_about_documents(suite_asked):
    """Those of both documents together, known and later; what is recalled answers one at a time."""
    model, suite, alone = suite_asked
    records = ask(model, suite, 6)
    assert timeless(records) == timeless(alone)
    assert all(r["first_seconds"] > 0 for r in alone)
    timed = {r["way"] for r in records if r["first_seconds"] is not None}
    assert timed == {r["way"] for r in records if r["selection_seconds"] is not None} == {"recall"}


def test_tables_tell_the_seconds_that_were_measured(suite_asked):
    *_, alone = suite_asked
    records = [r for r in alone if r["way"] in (FULL, SNAPKV)]
    untimed = [r | dict.fromkeys(SECONDS) for r in records[2:]]
    found = score_tables.summarise(records[:2] + untimed, PAGE)
    seconds = {(s["way"], s["setting"]): s["first_seconds"] for s in found}
    assert seconds[FULL, "known"] == sum(r["first_seconds"] for r in records[:2]) / 2
    known, _, later, _ = score_tables.tables(found, PAGE)
    assert "first token" in known.columns and "first token" not in later.columns
    rows = {row[0]: row[-2:] for row in known.rows}
    assert rows[SNAPKV] == ["", ""] and rows[FULL][0] == f"{seconds[FULL, 'known']:.2f} s"
    assert all(len(row) == len(later.columns) for row in later.rows)


def test_only_missing_questions_are_asked(suite_asked):
    model, suite, alone = suite_asked
    given = [r for i, r in enumerate(alone) if i % 3]
    for batch_size in (1, 6):
        assert timeless(ask(model, suite, batch_size, given)) == timeless(alone)
    kept = [r for r in ask(model, suite, 6, given) if r in given]
    assert kept == given  # with their seconds


class FirstLines:
    """Lines that the models go on with; only the first one counts."""

    def __init__(self, tokenizer, suite):
        self.tokenizer, self._suite = tokenizer, suite
        self._newline = tokenizer.encode("\n", add_special_tokens=False)

    def __len__(self):
        return 2

    def __iter__(self):
        for place, paper in self._suite:
            begin = paper.questions[0].prompt[:200]
            whole = begin + (begin[20:22] + self._newline) * 80
            asked = [
                asking.Question(whole[: 380 + i], None, len, 12, first_line=True) for i in range(3)
            ]
            yield place, Paper(asked, 300)


def test_an_answer_of_one_line_ends_with_it(suite_asked):
    model, suite, _ = suite_asked
    papers = FirstLines(suite.tokenizer, suite)
    alone = ask(model, papers, 1)
    assert timeless(ask(model, papers, 8)) == timeless(alone)
    assert sum(r["answer"].endswith("\n") for r in alone) > len(alone) // 2


def test_a_batch_has_so_many_prompts_and_entries(demo_llama, monkeypatch):
    model, tokenizer = demo_llama
    prompts = [Prompt([5 + i % 50] * n, 20) for i, n in enumerate((300, 500, 200, 600, 900, 100))]

    def most_at_once(batch_size, policy=None):
        begun, ended, most = [], [], []

        def counted():
            for i, prompt in enumerate(prompts):
                # The next is asked for, and its room not yet known.
                most.append(len(begun) - len(ended))
                begun.append(i)
                yield i, prompt

        for i, _ in answers(model, tokenizer, counted(), policy, {}, batch_size):
            ended.append(i)
        assert sorted(ended) == list(range(6))
        return max(most)

    assert most_at_once(2) == 2 and most_at_once(1) == 0
    assert most_at_once(8) == 5
    monkeypatch.setattr(batches, "ROOM", 1000)
    assert most_at_once(8) == 3
    assert most_at_once(8, resolve_policy(policy="keydiff:budget=50,block=64")) == 5


def test_a_failure_ends_the_run(demo_llama):
    model = make_llama()
    model.model.norm.weight *= mx.nan
    prompts = [(i, Prompt([3 + i] * 200, 5)) for i in range(2)]
    with pytest.raises(FloatingPointError, match="NaN"):
        list(answers(model, demo_llama[1], prompts, resolve_policy(policy=SNAPKV), {}, 2))


def test_models_that_mlx_lm_cant_batch_are_asked_one_at_a_time(demo_llama):
    model = make_model("gpt_bigcode")
    assert is_batchable(make_llama()) and not is_batchable(model)
    with pytest.raises(SnapKVError, match="one after the other"):
        next(
            batches.in_batches(
                model, demo_llama[1], [(0, Prompt([1], 1))], resolve_policy(policy=SNAPKV), 2
            )
        )
    prompts = [(i, Prompt([3 + i] * 200, 3)) for i in range(2)]
    found = answers(model, demo_llama[1], prompts, resolve_policy(policy=SNAPKV), {}, 2)
    assert all(answer.first_seconds > 0 for _, answer in found)


def test_the_help_tells_the_room():
    (option,) = BatchSize.__metadata__
    assert f"{batches.ROOM:,} entries" in option.help
