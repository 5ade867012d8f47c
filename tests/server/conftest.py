"""One server for the tests that leave it as it is."""

import pytest
from acting_server import acting
from server_helpers import serving


@pytest.fixture(scope="session")
def served():
    with serving() as found:
        yield found


@pytest.fixture(scope="session")
def agent():
    """A server whose model answers with what comes after "SAY: " in the last message, thoughts and calls as well."""
    with acting() as found:
        yield found
