"""Write docs/models.md from the package's own lists.

python scripts/write_models.py
"""

from pathlib import Path

from mlx_snapkv.models import listing

if __name__ == "__main__":
    page = Path(__file__).resolve().parent.parent / "docs" / "models.md"
    page.write_text(listing.markdown(), encoding="utf-8")
    print(f"wrote {page}")
