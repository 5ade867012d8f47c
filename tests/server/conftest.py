"""One server for the tests that leave it as it is."""

import random

import pytest
from acting_server import acting, answering
from server_helpers import serving

from mlx_snapkv.demo.questions import make_haystack


@pytest.fixture(scope="session")
def served():
    with serving() as found:
        yield found


@pytest.fixture(scope="session")
def agent():
    """A server whose model answers with what comes after "SAY: " in the last message, reasoning and calls as well."""
    with acting() as found:
        yield found


@pytest.fixture(scope="session")
def scripted():
    """A server whose model gives the answer of the test, under chat templates of several families."""
    with answering() as found:
        yield found


@pytest.fixture(scope="session")
def document(demo_llama):
    """A text of 1,500 tokens, and six facts hidden in it."""
    return make_haystack(demo_llama[1], random.Random(3), 6, 1500)
