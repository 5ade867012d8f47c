import json
import re

import pytest

from mlx_snapkv.cli.compare import _table
from mlx_snapkv.measure.compare import Compared
from mlx_snapkv.measure.tables import is_ours

SNAPKV = "budget=6%,n_sink=4,n_window=32"


@pytest.fixture
def fact(story):
    """Return the story's first fact."""
    path, facts = story
    return min(facts, key=lambda fact: path.read_text().index(fact.value))


@pytest.fixture
def ask(call, story, fact):
    """Return a function that asks a command about the first fact, and returns (exit code, stdout, stderr)."""

    def run(command, *options, model="demo"):
        question = ("--prompt-file", str(story[0]), "--prompt", fact.question)
        return call(command, "--model", model, *question, "-m", "8", *options)

    return run


def test_inspect_draws_the_kept_entries(ask, fact, tmp_path):
    path = tmp_path / "kept.html"
    policies = ("--snapkv", SNAPKV, "--policy", "streaming_llm:budget=6%")
    code, out, err = ask("inspect", *policies, "-o", str(path))
    assert code == 0 and f"wrote {path}" in err
    ours, other = out.split("streaming_llm:budget=6%")
    assert fact.value in ours.split("Answer")[0] and fact.value not in other.split("Answer")[0]
    for text in (ours, other):
        lines = [line for line in text.splitlines() if line.startswith("layer ")]
        assert [line[:7] for line in lines] == ["layer 0", "layer 1", "layer 2"]
        assert all("▒" in line or "█" in line for line in lines)
    assert "% " in ours and "fixed" not in ours and "no entry was chosen" in other
    assert path.read_text(encoding="utf-8").count("streaming_llm:budget=6%") == 1 and is_ours(path)


def test_json_output_has_positions_weights_and_sentences(ask, fact, tmp_path):
    path = tmp_path / "kept.png"
    options = ["--snapkv", SNAPKV, "--json", "-q", "-o", str(path)]
    code, out, err = ask("inspect", *options, model="demo-qwen3-next")
    told = json.loads(out)
    assert code == 0 and err == "" and is_ours(path) and path.read_bytes()[:4] == b"\x89PNG"
    (found,) = told["policies"]
    assert found["layers_without_entries"] == [0, 2]
    kept = found["report"]["entries_kept"][1]
    layer = found["layers"][0]
    assert layer["layer"] == 1 and 0 < layer["attention_share"] <= 1
    assert [len(head) for head in layer["positions"]] == [kept, kept]
    assert max(layer["positions"][0]) < told["prompt_tokens"] == len(told["spans"])
    assert any(fact.value in sentence["text"] for sentence in found["sentences"][:10])
    assert all(len(t["positions"]) == len(t["weights"]) > 0 for t in found["answer"]["tokens"])


def test_a_prompt_below_the_gate_says_so(ask):
    code, out, _ = ask("inspect", "--snapkv", "top_k=100,min_ctx=49152", "-q")
    assert code == 0 and "not compressed" in out and "min_ctx=0" in out
    assert "█" * 40 in out and "sentences" not in out


SMALL = "streaming_llm:budget=5%"


def test_compare_prints_answers_and_a_table_and_writes_a_page(ask, fact, tmp_path):
    page = tmp_path / "compared.html"
    code, out, err = ask("compare", "--policy", SMALL, "-o", str(page))
    assert code == 0 and f"wrote {page}" in err
    answers, table = out.split(" prompt tokens")
    assert answers.startswith(f"── full cache\n{fact.value}\n") and f"── {SMALL}" in answers
    rows = [line.split() for line in table.splitlines() if line.startswith((" full", f" {SMALL}"))]
    assert rows[0][-2:] == ["0.000", "all"] and int(rows[1][1]) < int(rows[0][2].replace(",", ""))
    assert re.search(rf"{SMALL}: after \d+ tokens.* it says .*, the full cache ", table)
    html = page.read_text(encoding="utf-8")
    assert is_ours(page) and "<del>" in html and "Entries kept of the prompt" in html
    assert 'class="t4"' in html and 'class="t0"' in html and "script" not in html


def test_rounding_errors_make_no_negative_divergence():
    same = Compared("snapkv", "yes", [1], 9, 99, 0.1, None, kl=-1e-9)
    assert "0.000" in _table([same], 9).rows[0]


def test_an_answer_that_is_not_compressed_yet_has_no_figures(ask):
    code, out, _ = ask("compare", "--policy", f"snapkv:{SNAPKV},lookahead=40")
    row = next(line for line in out.splitlines() if line.startswith(" snapkv"))
    said = " ".join(out.split())
    assert code == 0 and row.rstrip().endswith("not compressed yet")
    assert re.search(
        r"lookahead=40: not compressed yet: the answer has \d tokens, "
        "and the first 41 are decoded before the compression",
        said,
    )


def test_equal_tokens_are_counted_from_the_compression():
    full = Compared("full cache", "yes", [1], 9, 99, 0.1, None)
    differs = Compared("snapkv", "no", [1], 9, 99, 0.1, None, 0.5, 3, differs=(10, "", "", ""))
    assert [row[-1] for row in _table([full, differs], 9).rows] == ["all", "first 7"]


def test_without_options_compare_selects_two_policies_and_sparse_attention_for_the_length(ask):
    code, out, err = ask("compare", "--json", "-q")
    found = json.loads(out)
    full, *others = found["methods"]
    assert (code, err, full["name"]) == (0, "", "full cache")
    names = [way["name"].partition(":")[0] for way in others[:-1]]
    assert names == ["snapkv", "keydiff"] and others[-1]["name"] == "sparse:budget=6.25%"
    for way in others:
        assert way["reason"] is None and way["entries"] <= found["prompt_tokens"] / 4
