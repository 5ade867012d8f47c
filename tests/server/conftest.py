"""Servers shared by tests that don't change them."""

import random

import pytest
from acting_server import acting, answering
from server_helpers import serving

from mlx_snapkv.demo.questions import make_haystack


@pytest.fixture(scope="session")
def served():
    """Yield a server with a policy."""
    with serving() as found:
        yield found


@pytest.fixture(scope="session")
def agent():
    """Yield a server whose model answers with the text after "SAY: " in the last message, which may include calls."""
    with acting() as found:
        yield found


@pytest.fixture(scope="session")
def scripted():
    """Yield an `Agent`, whose model gives the answers that tests set, under the chat templates of several families."""
    with answering() as found:
        yield found


@pytest.fixture(scope="session")
def document(demo_llama):
    """Return a text of 1,500 tokens and the six facts hidden in it."""
    return make_haystack(demo_llama[1], random.Random(3), 6, 1500)
