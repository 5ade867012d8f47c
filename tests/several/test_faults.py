"""What goes wrong on one rank ends the work of all, soon, and they say why."""

import time

import pytest
from several_helpers import ROOT, started

FAULTS = str(ROOT / "tests" / "several_faults.py")
STARTING = 15  # seconds that processes get to start and to load the model on a busy machine


@pytest.mark.parametrize(
    ("how", "other", "own"),
    [
        ("raise", "rank 1: MemoryError: no room for the entries", "no room for the entries"),
        ("kill", "rank 1: has ended without a word", ""),
        (
            "policy",
            "rank 1 has another policy than rank 0",
            "rank 1 has another policy than rank 0",
        ),
        (
            "prompt",
            "rank 1 has another prompt than rank 0",
            "rank 1 has another prompt than rank 0",
        ),
        ("save", "rank 1: {folder}/none/a.safetensors can't be written", "there is no folder"),
    ],
)
def test_a_rank_that_fails_ends_all_with_its_sentence(tmp_path, how, other, own):
    begun = time.monotonic()
    (code, said), (its_code, its) = started(tmp_path, FAULTS, how, str(tmp_path), limit=60)
    assert time.monotonic() - begun < STARTING + 20
    assert code != 0 and its_code != 0
    assert other.format(folder=tmp_path) in said and own in its
    assert "went well" not in said + its
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_rank_that_fails_and_stays_leaves_nobody_waiting(tmp_path):
    begun = time.monotonic()
    (code, said), _ = started(tmp_path, FAULTS, "stay", str(tmp_path), limit=60)
    assert time.monotonic() - begun < STARTING + 70
    assert code == 1 and "mlx-snapkv: rank 1: MemoryError: no room for the entries" in said
