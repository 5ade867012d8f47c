"""The pages of the docs are written from their results, never typed."""

import json
from pathlib import Path

import pytest

from scripts import (
    benchmark_long_answers,
    measure_kv_bits,
    measure_long_answers,
    measure_plan,
    measure_turns,
    quality_page,
    try_agents,
)

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    "name, script",
    [
        ("kv-bits", measure_kv_bits),
        ("turns", measure_turns),
        ("long-answers", measure_long_answers),
        ("long-answers-time", benchmark_long_answers),
        ("plan", measure_plan),
        ("quality", quality_page),
        ("agents", try_agents),
    ],
)
def test_a_page_is_its_result(name, script):
    result = json.loads((DOCS / f"{name}.json").read_text(encoding="utf-8"))
    assert (DOCS / f"{name}.md").read_text(encoding="utf-8") == script.page(result)
