"""One server for the tests that leave it as it is."""

import pytest
from server_helpers import serving


@pytest.fixture(scope="session")
def served():
    with serving() as found:
        yield found
