"""What two processes keep and answer is what one does, whatever the policy and however they share the model."""

import json

import pytest
from several_cases import POLICIES, SAVED, WAYS, loaded, prompt_of, run, save
from several_helpers import ROOT, started

CASES = str(ROOT / "tests" / "several_cases.py")
KINDS = {"tensor": "demo", "pipeline": "demo-qwen3-next"}


@pytest.fixture(scope="module", params=KINDS)
def found(request, tmp_path_factory):
    """The kind, and what one process and two have found; the files that both have saved."""
    kind, folder = request.param, tmp_path_factory.mktemp(request.param)
    fixture = "demo_llama" if kind == "tensor" else "demo_qwen"
    model, tokenizer = request.getfixturevalue(fixture)
    tokens = prompt_of(tokenizer)
    one = run(model, tokenizer, ("all",) if kind == "pipeline" else ())
    for name in SAVED:
        save(model, tokens, folder / f"one-{name}.safetensors", POLICIES[name])
        one[f"one-{name}"] = loaded(model, tokens, folder / f"one-{name}.safetensors")
    for code, said in started(folder, CASES, str(folder), KINDS[kind], kind):
        assert code == 0, said
    two = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    for name in SAVED:  # saved by two, and loaded by this one
        one[f"two-{name}"] = loaded(model, tokens, folder / f"two-{name}.safetensors")
    return kind, one, two


def together(kind, kept):
    """What two ranks keep, by layer and head of the model."""
    if kind == "pipeline":
        assert not set(kept[0]) & set(kept[1])
        return kept[0] | kept[1]
    return {layer: heads + kept[1][layer] for layer, heads in kept[0].items()}


@pytest.mark.parametrize(
    "name", [*POLICIES, *(f"{by}-{name}" for by in ("one", "two") for name in SAVED)]
)
def test_every_policy_keeps_and_answers_the_same(found, name):
    kind, one, two = found
    assert together(kind, [rank[name]["kept"] for rank in two]) == one[name]["kept"]
    assert two[0][name]["said"] == two[1][name]["said"] == one[name]["said"]


@pytest.mark.parametrize("name", SAVED)
def test_a_file_gives_what_was_kept(found, name):
    _, one, _ = found
    assert one[name] | one[f"two-{name}"] == one[name]


@pytest.mark.parametrize("name", WAYS)
def test_answers_that_ask_all_entries_are_the_same(found, name):
    _, one, two = found
    if name in one:
        assert two[0][name] == two[1][name] == one[name]


def test_reports_are_those_of_the_whole_model(found):
    kind, one, two = found
    for name in POLICIES:
        entries, before, after, shares = one[name]["report"]
        for rank in two:
            assert rank[name]["report"][:3] == [entries, before, after]
            for mine, theirs in zip(rank[name]["report"][3], shares):
                assert mine == (theirs if theirs is None else pytest.approx(theirs, rel=1e-3))
        ranks = two[0][name]["ranks"]
        assert ranks == two[1][name]["ranks"] and len(ranks) == 2
        assert sum(rank["kv_bytes_after"] for rank in ranks) == after
        assert sum(rank["layers"] for rank in ranks) == len(entries) * (
            2 if kind == "tensor" else 1
        )
        assert one[name]["ranks"] is None
