"""Results are recorded in a file, and not measured again."""

import json

import pytest

from mlx_snapkv.errors import SnapKVError
from mlx_snapkv.measure.records import Results

SETTING = {"task": "needle", "seed": 0}


def asked(question):
    place = {"setting": "known", "task": "needle", "length": 256, "document": 0}
    return {"method": "p", **place, "question": question}


def record(question):
    return asked(question) | {"score": 1.0}


@pytest.fixture
def path(tmp_path):
    """Return a file with two records."""
    with Results(SETTING, tmp_path / "r.jsonl") as results:
        results.add(record(0))
        results.add(record(1))
    return tmp_path / "r.jsonl"


@pytest.mark.parametrize("kept", [-1, -40, 7])
def test_an_unfinished_line_is_dropped(path, kept):
    """The first line is the run's setting. Without it, the file starts over."""
    whole = path.read_bytes()
    path.write_bytes(whole[:kept])
    with Results(SETTING, path) as results:
        for n in (0, 1) if kept > 0 else (1,):
            assert results.get(asked(n)) is None
            results.add(record(n))
    assert path.read_bytes() == whole


FIRST = json.dumps(SETTING) + "\n"


@pytest.mark.parametrize(
    "content, words",
    [
        *(
            (x, "belongs to another run, with task None instead of .needle.")
            for x in ("a poem", "[]\n", "\n")
        ),
        (FIRST.replace("0", "1"), "belongs to another run, with seed 1 instead of 0"),
        (FIRST.replace("}", ', "model": "m"}'), "with model 'm' instead of None"),
        *((f"{FIRST}{x}\n{{}}\n", "line 2 is damaged") for x in ("{}", "oops", '{"method": []}')),
    ],
)
def test_another_file_is_refused_by_name_and_left_alone(tmp_path, content, words):
    path = tmp_path / "r.jsonl"
    path.write_text(content)
    with pytest.raises(SnapKVError, match=words):
        Results(SETTING, path)
    assert path.read_text() == content


def test_a_file_belongs_to_one_run(path):
    with Results(SETTING, path), pytest.raises(SnapKVError, match="is in use by another run"):
        Results(SETTING, path).__enter__()
