"""docs/choose.md tells figures of every row, and of no other."""

import choose_page

from mlx_snapkv.cli.choices import CHOICES


def test_every_row_has_its_figures():
    assert [choice.name for choice in CHOICES] == list(choose_page.FIGURES)
    assert "None" not in choose_page.page()
