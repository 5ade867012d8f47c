"""KV-cache compression for mlx-lm: long prompts, small caches, the same answers.

The names are those of `api`. MLX and mlx-lm take a second to import, so nothing of them is until it is used.
"""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ._version import __version__ as __version__

if TYPE_CHECKING:
    from .api import *  # noqa: F403
    from .api import __all__ as __all__

else:  # hidden from type checkers, to which any name would exist

    def __getattr__(name: str) -> Any:
        if find_spec(f"{__name__}.{name}") is not None:
            return importlib.import_module(f".{name}", __name__)
        api = importlib.import_module(".api", __name__)
        if name != "__all__" and name not in api.__all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(api, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *sys.modules[__name__].__all__})


class _CachesWithMlxLm:
    """Imports our caches right after mlx-lm, whose `load_prompt_cache` is to find them by name."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != "mlx_lm":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_both(module: Any) -> None:
                execute(module)
                importlib.import_module(f"{__name__}.caches")

            spec.loader.exec_module = execute_both  # type: ignore[method-assign]
        return spec


if "mlx_lm" in sys.modules:
    importlib.import_module(f"{__name__}.caches")
else:
    sys.meta_path.insert(0, _CachesWithMlxLm())
