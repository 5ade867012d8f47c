import json
from pathlib import Path

from mlx_snapkv.bench.book import READS, VOTES
from mlx_snapkv.policies import resolve_policy
from scripts.book_page import cost, page
from scripts.measure_book import LEAST, SHARES, Cell, all_cells, documents, measured

DOCS = Path(__file__).parents[2] / "docs"


def test_every_cell_is_another_and_its_policy_has_room():
    cells = all_cells(["demo", "demo-qwen3-next"], (4096, 16000))
    assert len(set(cells)) == len(cells)
    for cell in cells:
        if cell.policy is not None:
            policy = resolve_policy(policy=cell.policy)
            _, decode_policy = policy.stages
            policy.prefill_quotas(cell.tokens, 3)
            if cell.memory.startswith("recall") and cell.about != "gathered":
                assert decode_policy.quotas(cell.tokens, 3)[0].entries >= LEAST
    ways = {(c.model, c.tokens, c.share) for c in cells if (c.about, c.way) == ("shares", "this")}
    assert len(ways) == 2 * 2 * len(SHARES)


def test_questions_are_as_many_as_asked_and_the_same_for_every_way(demo_model):
    tokenizer = demo_model[1]
    for task in ("facts", "several"):
        mine, other = (
            list(
                documents(Cell("shares", "demo", 600, way, None, "drop", task=task), tokenizer, 13)
            )
            for way in ("this", "two stages")
        )
        assert mine == other and sum(len(questions) for _, questions in mine) == 13


def test_a_cell_is_measured_once(tmp_path):
    kept = tmp_path / "cells.json"
    cells = [Cell("shares", "demo", 600, "full cache", None, "drop")]
    (row,) = measured(cells, 2, kept)
    assert (row["right"], row["asked"]) == (2, 2)
    found = json.loads(kept.read_text())
    found[0]["right"] = 1
    kept.write_text(json.dumps(found))
    assert measured(cells, 2, kept)[0]["right"] == 1
    assert measured(cells, 1, kept)[0]["right"] == 1 == len(json.loads(kept.read_text())) - 1


def test_the_page_in_the_docs_is_its_results():
    result = json.loads((DOCS / "book.json").read_text(encoding="utf-8"))
    text = (DOCS / "book.md").read_text(encoding="utf-8")
    assert text == page(result, cost())
    gathered = VOTES.quotas(0, 1)[0].entries
    assert f"{gathered:,} with sink and window" in text and READS.block == 512
