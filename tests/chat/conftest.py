import random

import pytest

from mlx_snapkv.demo.questions import make_haystack


@pytest.fixture(scope="session")
def haystack(demo_llama):
    return make_haystack(demo_llama[1], random.Random(3), 4, 400)
