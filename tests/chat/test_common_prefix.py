import pytest

from mlx_snapkv.chat.prompts import common_prefix


@pytest.mark.parametrize(
    "prompts, shared",
    [
        ([[1, 2, 3], [1, 2, 4], [1, 2, 3]], 2),
        ([[1, 2, 3], [1, 2]], 2),
        ([[1], [2]], 0),
        ([[], [2]], 0),
        ([[5, 6]], 2),
    ],
)
def test_it_ends_where_the_first_prompt_parts_from_the_others(prompts, shared):
    assert common_prefix(prompts) == shared
