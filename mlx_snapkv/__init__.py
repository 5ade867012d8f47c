"""KV-cache compression for mlx-lm: long prompts, small caches.

The public names are listed in `api`. They are loaded on first use, because importing MLX and mlx-lm takes a second.
"""

import importlib
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ._version import __version__ as __version__

if TYPE_CHECKING:
    from .api import *  # noqa: F403

else:  # hide `__getattr__` from type checkers, or they will accept any name

    def __getattr__(name: str) -> Any:
        if find_spec(f"{__name__}.{name}") is not None:
            return importlib.import_module(f".{name}", __name__)
        api = importlib.import_module(".api", __name__)
        names = {key: value for key, value in vars(api).items() if not key.startswith("_")}
        names["__all__"] = list(names)
        if name not in names:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return names[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *sys.modules[__name__].__all__})
