import pytest
from request_helpers import assert_unpatched


@pytest.fixture(autouse=True)
def nothing_stays_patched():
    yield
    assert_unpatched()
