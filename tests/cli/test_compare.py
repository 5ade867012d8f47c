"""`mlx-snapkv compare`, and /compare in a chat."""

import json
import re

from mlx_snapkv.cli.compare import _table
from mlx_snapkv.evals.compare import Compared
from mlx_snapkv.reporting.files import is_ours

SMALL = "streaming_llm:budget=5%"


def test_answers_a_table_and_a_page(call, story, tmp_path):
    path, facts = story
    fact = min(facts, key=lambda fact: path.read_text().index(fact.value))
    page = tmp_path / "compared.html"
    asked = ("--prompt-file", str(path), "--prompt", fact.question, "-m", "8")
    code, out, err = call("compare", "--model", "demo", *asked, "--policy", SMALL, "-o", str(page))
    assert code == 0 and f"wrote {page}" in err
    answers, table = out.split(" prompt tokens")
    assert answers.startswith(f"── full cache\n{fact.value}\n") and f"── {SMALL}" in answers
    rows = [line.split() for line in table.splitlines() if line.startswith((" full", f" {SMALL}"))]
    assert rows[0][-2:] == ["0.000", "all"] and int(rows[1][1]) < int(rows[0][2].replace(",", ""))
    assert re.search(rf"{SMALL}: after \d+ tokens.* it says .*, the full cache ", table)
    html = page.read_text(encoding="utf-8")
    assert is_ours(page) and "<del>" in html and "What was kept of the prompt" in html
    assert 'class="t4"' in html and 'class="t0"' in html and "script" not in html


def test_rounding_leaves_no_negative_divergence():
    same = Compared("snapkv", "yes", [1], 9, 99, 0.1, None, kl=-1e-9)
    assert "0.000" in _table([same], 9).rows[0]


def test_three_policies_that_suit_the_length(call, story):
    path, facts = story
    asked = ("--prompt-file", str(path), "--prompt", facts[0].question, "-m", "4")
    code, out, err = call("compare", "--model", "demo", *asked, "--json", "-q")
    found = json.loads(out)
    full, *others = found["ways"]
    assert code == 0 and err == "" and full["name"] == "full cache" and len(others) == 3
    for way in others:
        assert way["reason"] is None and way["entries"] <= found["prompt_tokens"] / 4


def test_a_chat_compares_its_last_answer(call, story):
    path, facts = story
    lines = f"/file {path}\n{facts[0].question}\n/compare\n/verify\n"
    asked = ("chat", "--model", "demo", "--snapkv", "top_k=64,lookahead=0", "-m", "24")
    code, out, err = call(*asked, "--memory", "recall", stdin=lines.encode())
    assert code == 0 and out.splitlines() == [facts[0].value] * 2
    assert "from all entries: the same answer" in err and err.endswith("verify: none\n")
    code, _, err = call(*asked, stdin=lines.encode())
    assert code == 2 and "chat with --memory recall" in err
