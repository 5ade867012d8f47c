"""Write what the docs tell of the package itself: its policies, its commands, its model types, the README's tables.

python scripts/write_docs.py     # or: make docs
"""

from __future__ import annotations

from pathlib import Path

import choose_page
import commands_page
import policies_page
import readme_tables
import several_macs

from mlx_snapkv.models import listing

ROOT = Path(__file__).resolve().parent.parent


def pages() -> dict[str, str]:
    """By path, the files as they should be."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    several = (ROOT / "docs/several-macs.md").read_text(encoding="utf-8")
    return {
        "README.md": readme_tables.filled(readme),
        "docs/choose.md": choose_page.page(),
        "docs/policies.md": policies_page.page(),
        "docs/commands.md": commands_page.page(),
        "docs/models.md": listing.markdown(),
        "docs/several-macs.md": several_macs.filled(several),
    }


if __name__ == "__main__":
    for path, text in pages().items():
        (ROOT / path).write_text(text, encoding="utf-8")
        print(f"wrote {path}")
