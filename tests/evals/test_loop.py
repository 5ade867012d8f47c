"""What is measured is recorded, and not measured again."""

import json

import mlx.core as mx
import pytest

from mlx_snapkv.errors import SnapKVError
from mlx_snapkv.evals.loop import WAITING, Results, run

SETTING = {"task": "needle", "seed": 0}


def asked(method, question):
    place = {"setting": "known", "task": "needle", "length": 256, "document": 0}
    return {"method": method, **place, "question": question}


def record(question):
    return asked("p", question) | {"score": 1.0}


@pytest.fixture
def path(tmp_path):
    """A file with two records."""
    results = Results(SETTING, tmp_path / "r.jsonl")
    results.add(record(0))
    results.add(record(1))
    return tmp_path / "r.jsonl"


def test_records_are_there_again(path):
    results = Results(SETTING, path)
    assert results.get(asked("p", 1)) == record(1)
    assert results.get(asked("p", 2)) is None and results.get(asked("q", 1)) is None


@pytest.mark.parametrize("kept", [-1, -40, 7])
def test_an_unfinished_line_is_dropped(path, kept):
    """The last one; the first one starts the file anew."""
    whole = path.read_bytes()
    path.write_bytes(whole[:kept])
    results = Results(SETTING, path)
    for n in (0, 1) if kept > 0 else (1,):
        assert results.get(asked("p", n)) is None
        results.add(record(n))
    assert path.read_bytes() == whole


@pytest.mark.parametrize("content", ["a poem", '{"a": 1}\n', "[]\n", "\n"])
def test_another_kind_of_file_is_refused_and_left_alone(tmp_path, content):
    path = tmp_path / "r.jsonl"
    path.write_text(content)
    with pytest.raises(SnapKVError, match="is not the file of an evaluation"):
        Results(SETTING, path)
    assert path.read_text() == content


def test_another_setting_is_refused_by_name(path):
    with pytest.raises(SnapKVError, match="of another run, with seed 0 and not 1"):
        Results(SETTING | {"seed": 1}, path)
    with pytest.raises(SnapKVError, match="with model None and not 'demo'"):
        Results(SETTING | {"model": "demo"}, path)


@pytest.mark.parametrize("line", ["{}", "oops", '{"method": []}'])
def test_a_damaged_line_is_named(path, line):
    with path.open("a") as file:
        file.write(line + "\n" + json.dumps(record(2)) + "\n")
    with pytest.raises(SnapKVError, match="line 4 is damaged"):
        Results(SETTING, path)


def test_arrays_are_computed_while_the_next_document_is_read(tmp_path):
    """What is missing is measured; a record is written when others follow it, and its numbers are computed."""
    path = tmp_path / "r.jsonl"
    events = []

    def documents(n):
        def measure(missing):
            for place in missing:
                events.append((place["question"], path.read_text().count("\n") - 1))
                yield place | {"score": mx.array(1.0) + place["question"]}

        for i in range(0, n, 2):
            yield [asked("p", i), asked("p", i + 1)], measure

    run(documents(2), Results(SETTING, path))
    assert events == [(0, 0), (1, 0)]
    events.clear()
    told = []
    records = run(documents(2 * WAITING), Results(SETTING, path), told.append)
    assert [record["score"] for record in records] == list(range(1, 2 * WAITING + 1))
    assert told == [False] + [True] * (WAITING - 1)
    waiting = WAITING if mx.default_device().type == mx.cpu else 0
    assert events == [(i, max(2, i - waiting)) for i in range(2, 2 * WAITING)]
