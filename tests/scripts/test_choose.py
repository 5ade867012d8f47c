"""docs/choose.md has every row, with its command."""

import choose_page

from mlx_snapkv.cli.choices import CHOICES


def test_every_row_is_there():
    page = choose_page.page()
    for choice in CHOICES:
        assert f"| {choice.when} | {choice.why} |" in page
        assert all(word in page for word in choice.command.split(" --"))
