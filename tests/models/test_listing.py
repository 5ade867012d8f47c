from pathlib import Path

from mlx_snapkv.models import listing

DOCS = Path(__file__).parents[2] / "docs"


def test_the_docs_page_is_the_packages_own_list():
    assert (DOCS / "models.md").read_text(encoding="utf-8") == listing.markdown()


def test_names_that_mlx_lm_loads_with_another_type_are_found():
    assert ("llama", "iquestcoder, mistral, xverse") in [row[:2] for row in listing.supported()]
    assert ("deepseek_v3", "joyai_llm_flash, kimi_k2") in [row[:2] for row in listing.supported()]
