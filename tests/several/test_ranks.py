"""Two processes keep and answer what one does, however they share the model; a rank that fails ends both."""

import json
import time

import pytest
from several_cases import ANSWERS, POLICIES, REFUSED, run
from several_helpers import started

KINDS = {"tensor": "demo", "pipeline": "demo-qwen3-next"}
STARTING = 15  # seconds that processes get to start and to load the model on a busy machine


@pytest.fixture(scope="module", params=KINDS)
def found(request, tmp_path_factory):
    """How the model is shared, and what one process and two have found."""
    kind, folder = request.param, tmp_path_factory.mktemp(request.param)
    for code, said in started(folder, "several_cases", str(folder), KINDS[kind], kind):
        assert code == 0, said
    two = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    model = request.getfixturevalue("demo_llama" if kind == "tensor" else "demo_qwen")
    return kind, run(*model, REFUSED[KINDS[kind]]), two


def together(kind, kept):
    """What two ranks keep, by layer and head of the model."""
    if kind == "pipeline":
        assert not set(kept[0]) & set(kept[1])
        return kept[0] | kept[1]
    return {layer: heads + kept[1][layer] for layer, heads in kept[0].items()}


@pytest.mark.parametrize("name", POLICIES)
def test_two_keep_and_answer_what_one_does(found, name):
    kind, one, two = found
    assert together(kind, [rank[name]["kept"] for rank in two]) == one[name]["kept"]
    assert two[0][name]["said"] == two[1][name]["said"] == one[name]["said"]
    assert sum(rank[name]["kv_bytes"] for rank in two) == one[name]["kv_bytes"]


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_are_the_same_however_they_are_decoded(found, name):
    _, one, two = found
    if name in one:
        assert two[0][name] == two[1][name] == one[name]


@pytest.mark.parametrize(
    ("how", "other", "own"),
    [
        ("raise", "rank 1: MemoryError: no room for the entries", "no room for the entries"),
        ("kill", "rank 1: ended unexpectedly", ""),
        ("options", "rank 1 has another options than rank 0", "rank 1 has another options"),
        (
            "adaptive",
            "which several Macs don't hold together",
            "give a number, a share or a pyramid",
        ),
        ("save", "prompt caches can't be saved on several Macs", "start it without mlx.launch"),
    ],
)
def test_a_rank_that_fails_ends_both_with_its_sentence(tmp_path, how, other, own):
    begun = time.monotonic()
    (code, said), (its_code, its) = started(tmp_path, "several_faults", how, limit=60)
    assert time.monotonic() - begun < STARTING + 20
    assert code != 0 and its_code != 0
    assert other in said and own in its and "went well" not in said + its
