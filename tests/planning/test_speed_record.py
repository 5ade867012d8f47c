"""The speed record: lines fitted to measurements, the file, and predictions."""

import json
import math
import os
import sys
from pathlib import Path

import pytest
from speed_helpers import LOSES, WINS_LATER, speed
from tiny_models import make_llama, make_qwen

from mlx_snapkv import Sparse
from mlx_snapkv.planning import speed_record as module
from mlx_snapkv.planning.break_even import BreakEven, break_even
from mlx_snapkv.planning.speed_record import (
    DECODE_FULL,
    DECODE_SPARSE,
    FORGETTING_RATE,
    MAX_KEYS,
    PATH_VARIABLE,
    SETUP,
    Line,
    Measurement,
    Speed,
    record_measurements,
    record_path,
    speed_of,
)

SPARSE = Sparse()
ONE = [Measurement(DECODE_FULL, 1000, 0.5)]


def line(*points):
    found = Line()
    for length, seconds in points:
        found = found.with_measurement(length, seconds)
    return found


@pytest.fixture(scope="module")
def model():
    return make_llama()


def test_lengths_that_differ_give_a_line():
    found = line((1000, 3.0), (2000, 5.0), (4000, 9.0))
    assert found.lower_bound(8000) == pytest.approx(found.upper_bound(8000)) == pytest.approx(17)


@pytest.mark.parametrize("points", [[(1000, 2.0)], [(1000, 2.0), (1010, 2.0)], [(0, 2.0)]])
def test_one_length_gives_bounds(points):
    """Time does not decrease with length, and does not grow faster than length."""
    found = line(*points)
    assert found.lower_bound(4000) == pytest.approx(2, rel=0.01) and found.upper_bound(500) >= 1.99
    if points[0][0]:
        assert found.upper_bound(4000) == pytest.approx(8, rel=0.02)
        assert found.lower_bound(500) == pytest.approx(1, rel=0.02)


@pytest.mark.parametrize("points", [[(1000, 5.0), (9000, 1.0)], [(1000, 0.1), (9000, 9.0)]])
def test_times_are_never_negative_and_never_fall(points):
    found = line(*points)
    assert 0 <= found.lower_bound(0) <= found.lower_bound(500) <= found.lower_bound(10**7)


def test_older_measurements_are_forgotten():
    found = line(*[(1000, 9.0)] * 10, *[(1000, 1.0)] * 200)
    assert found.upper_bound(1000) == pytest.approx(1, abs=0.02)
    assert found.weight == pytest.approx(1 / FORGETTING_RATE, rel=0.01)


def test_the_file_keeps_models_and_methods_apart(record, model):
    assert speed_of(model, SPARSE) == Speed()
    record_measurements(model, SPARSE, ONE)
    kept = speed_of(model, SPARSE)
    assert kept.lines == {DECODE_FULL: line((1000, 0.5))}
    assert speed_of(model, Sparse(when="always")) == kept  # `when` is not part of the method
    for other, sparse in ((make_qwen(), SPARSE), (model, Sparse(budget="3%"))):
        assert speed_of(other, sparse) == Speed()
        record_measurements(other, sparse, ONE)
    assert speed_of(model, SPARSE) == kept and len(json.loads(record.read_text())["speeds"]) == 3
    record_measurements(
        model, SPARSE, [Measurement(DECODE_FULL, 2000, 0.7), Measurement(SETUP, 0, 0.0)]
    )
    assert speed_of(model, SPARSE).lines == {DECODE_FULL: line((1000, 0.5), (2000, 0.7))}


@pytest.mark.parametrize("name", ["__version__", "processor", "this_machine"])
def test_other_machines_and_versions_have_their_own(record, model, name, monkeypatch):
    record_measurements(model, SPARSE, ONE)
    old = getattr(module, name)
    other = "0.0.9"
    if name == "processor":
        other = lambda: "another"  # noqa: E731
    elif name == "this_machine":
        other = lambda: old()._replace(memory=1)  # noqa: E731
    monkeypatch.setattr(module, name, other)
    assert speed_of(model, SPARSE) == Speed()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b"{}",
        b"[1]",
        b'{"format": 99, "speeds": {}}',
        b'{"format": 1, "speeds": [1]}',
        b'{"format": 1, "speeds": {"a": {"setup": [1, 2]}}}',
        b'{"format": 1, "speeds": {"a": {"setup": [1, 2, 3, NaN, 5]}}}',
        b'{"format": 1, "speeds": {"a": {"setup": [0, 0, 0, 0, 0]}}}',
        b'{"format": 1, "speeds": {"a": {"setup": [1, 2, 3, 4, 5, 6]}}}',
        b'{"format": 1, "speeds": {"a": {"setup": [1, 2, 3, 4, 1%s]}}}' % (b"0" * 400),
    ],
)
def test_an_unreadable_file_is_ignored_and_replaced(record, model, content):
    record.parent.mkdir()
    record.write_bytes(content)
    assert speed_of(model, SPARSE) == Speed()
    record_measurements(model, SPARSE, ONE)
    assert set(speed_of(model, SPARSE).lines) == {DECODE_FULL}


def test_a_record_that_cannot_be_written_is_not_kept(tmp_path, model, monkeypatch):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "speed.json", tmp_path, tmp_path / ("a" * 3000)):
        monkeypatch.setenv(PATH_VARIABLE, str(path))
        record_measurements(model, SPARSE, ONE)
        assert speed_of(model, SPARSE) == Speed()
    assert sorted(tmp_path.iterdir()) == [tmp_path / "file"]


def test_a_write_that_fails_leaves_the_file_as_it_was(record, model, monkeypatch):
    record_measurements(model, SPARSE, ONE)
    before = record.read_bytes()

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        record_measurements(model, SPARSE, ONE)
    assert record.read_bytes() == before and list(record.parent.iterdir()) == [record]


def test_requests_that_read_their_prompts_differently_share_a_record(record, model):
    record_measurements(model, Sparse(read="sparse", when="always"), ONE)
    record_measurements(model, Sparse(read_top_k=512), ONE)
    assert speed_of(model, Sparse()) != Speed() and len(_keys(record)) == 1


def _keys(record):
    return json.loads(record.read_text())["speeds"]


def test_the_oldest_keys_are_dropped(record, model):
    for n in range(MAX_KEYS + 2):
        record_measurements(model, Sparse(budget=2000 + n), ONE)
    assert len(json.loads(record.read_text())["speeds"]) == MAX_KEYS
    assert speed_of(model, Sparse(budget=2001)) == Speed()
    assert speed_of(model, Sparse(budget=2002)) != Speed()


def test_the_record_is_in_the_users_cache_folder(monkeypatch):
    monkeypatch.delenv(PATH_VARIABLE)
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for platform, folder in (("linux", ".cache"), ("darwin", "Library/Caches")):
        monkeypatch.setattr(sys, "platform", platform)
        assert record_path() == Path("/home/me") / folder / "mlx-snapkv" / "speed.json"
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert record_path() == Path("/caches/mlx-snapkv/speed.json")
    monkeypatch.setenv(PATH_VARIABLE, "")
    assert record_path() is None


def test_an_answer_is_predicted():
    sparse, full = speed(WINS_LATER).predict_seconds(32_000, 256)
    mean = 32_128
    assert full == pytest.approx(256 * (0.01 + 1e-6 * mean))
    assert sparse == pytest.approx(1 + 256 * (0.02 + 1e-7 * mean))
    for kind in (SETUP, DECODE_FULL, DECODE_SPARSE):
        lacking = {name: x for name, x in WINS_LATER.items() if name != kind}
        assert speed(lacking).predict_seconds(32_000, 256) is None


def test_the_index_is_repaid_by_faster_tokens():
    decoding = {DECODE_FULL: (0.01, 1e-6), DECODE_SPARSE: (0.02, 1e-7), SETUP: (1.0, 1e-5)}
    saved = 0.11 - 0.03  # seconds a token, at 100,000 entries
    assert speed(decoding).tokens_to_repay_setup(100_000) == pytest.approx(2 / saved)
    assert speed(decoding).tokens_to_repay_setup(1000) == math.inf
    assert Speed().tokens_to_repay_setup(1000) == 0
    del decoding[SETUP]
    assert speed(decoding).tokens_to_repay_setup(100_000) == 0


def test_sparse_attention_loses_only_if_that_is_certain():
    decoding = {DECODE_FULL: (0.01, 1e-6), DECODE_SPARSE: (0.02, 1e-7)}
    assert speed(decoding).is_sparse_slower(8000, 256) and not speed(decoding).is_sparse_slower(
        64_000, 256
    )
    assert speed(WINS_LATER).is_sparse_slower(
        64_000, 10
    )  # the index takes longer than ten tokens save
    assert not speed(WINS_LATER).is_sparse_slower(64_000, 256)
    assert not speed(WINS_LATER).is_sparse_slower(64_000, 10, has_index=True)
    assert not Speed().is_sparse_slower(8000, 256)
    one = Speed({DECODE_FULL: line((1000, 0.1)), DECODE_SPARSE: line((1000, 0.11))})
    assert one.is_sparse_slower(1000, 0) and not one.is_sparse_slower(8000, 0)
    both = line((1000, 0.1), (2000, 0.2))
    as_fast = Speed({DECODE_FULL: both, DECODE_SPARSE: both})
    assert not as_fast.is_sparse_slower(8000, 256)


def test_a_break_even_has_a_length_and_a_basis():
    found = break_even(speed(WINS_LATER), Speed())
    assert found == BreakEven("measured", 16_384)
    assert str(found) == "sparse decoding pays from 16,384 tokens on (measured)"
    never = break_even(Speed(), speed(LOSES))
    assert str(never) == "sparse decoding pays at no length up to 1,048,576 (estimated)"
    assert str(break_even(Speed(), Speed())).startswith("no request has measured yet")
