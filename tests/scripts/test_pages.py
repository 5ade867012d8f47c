"""docs/quality.md is written from its result, never typed; the other pages are in test_docs.py."""

import json
from pathlib import Path

from scripts import quality_page

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_its_result():
    result = json.loads((DOCS / "quality.json").read_text(encoding="utf-8"))
    assert (DOCS / "quality.md").read_text(encoding="utf-8") == quality_page.page(result)
