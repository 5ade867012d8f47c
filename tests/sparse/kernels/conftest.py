import os

import pytest
from kernel_shim import COMPILER, Shim

from mlx_snapkv.sparse.kernels import launch


@pytest.fixture
def shim(monkeypatch, tmp_path_factory):
    """Make the kernels run on a CPU. All workers of a test run share the compiled kernels."""
    if COMPILER is None:
        pytest.skip("the shim needs g++ on Linux")
    folder = tmp_path_factory.getbasetemp()
    shim = Shim(folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder)
    monkeypatch.setattr(launch, "kernel", shim.kernel)
    return shim
