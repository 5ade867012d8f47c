"""Write what the docs tell of the package itself and what was measured: whole pages, and the tables of the others.

python scripts/write_docs.py     # or: make docs
"""

from __future__ import annotations

import commands_page
import models_page
import policies_page
import tables
from results_page import ROOT

WHOLE = {
    "docs/policies.md": policies_page.page,
    "docs/commands.md": commands_page.page,
    "docs/models.md": models_page.page,
}


def pages() -> dict[str, str]:
    """By path, the files as they should be."""
    found = {path: page() for path, page in WHOLE.items()}
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        if "<!-- " in text:
            found[str(path.relative_to(ROOT))] = tables.filled(text)
    return found


if __name__ == "__main__":
    for path, text in pages().items():
        (ROOT / path).write_text(text, encoding="utf-8")
        print(f"wrote {path}")
