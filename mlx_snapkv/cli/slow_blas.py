"""MLX's Linux wheel brings a slow BLAS: whoever reads a long prompt with it is told, once, of a faster one."""

import functools
import re
from pathlib import Path

from rich.console import Console

LONG = 2048  # tokens
PACKAGE = "libopenblas0-pthread"
PLACES = ("*/openblas-pthread/libopenblas.so.0", "libopenblas.so.0")
_ITS_OWN = re.compile(r"/mlx_cpu\.libs/libblas")
_FASTER = re.compile(r"/lib(openblas|mkl_rt|blis)")


@functools.cache
def tell_slow_blas(console: Console) -> None:
    """One line, where it is true and somebody sees it."""
    libraries = Path("/proc/self/maps")
    if not console.is_terminal or not libraries.exists():
        return
    text = libraries.read_text()
    if _ITS_OWN.search(text) and not _FASTER.search(text):
        said = f"Long prompts are read several times faster {_remedy()}"
        console.print(said, soft_wrap=True, highlight=False, markup=False)


def _remedy() -> str:
    installed = [
        file
        for folder in ("/usr/lib", "/usr/lib64")
        for place in PLACES
        for file in sorted(Path(folder).glob(place))
    ]
    if installed:
        return f"with LD_PRELOAD={installed[0]}"
    return f"with OpenBLAS: install {PACKAGE} and set LD_PRELOAD to its libopenblas.so.0"
