import pytest
from kernel_shim import COMPILER, Shim

from mlx_snapkv.sparse.kernels import launch


@pytest.fixture
def shim(monkeypatch):
    """The kernels run on a CPU."""
    if COMPILER is None:
        pytest.skip("the shim needs g++ on Linux")
    shim = Shim()
    monkeypatch.setattr(launch, "kernel", shim.kernel)
    return shim
