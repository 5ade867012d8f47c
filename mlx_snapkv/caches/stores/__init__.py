"""Where a layer's entries are kept between turns, one file a kind of store."""

import importlib
import pkgutil

from .base import STORES as STORES
from .base import Store as Store

# The order of these two is that of the memories in lists; any other file here follows.
# isort: off
from .memory import MemoryStore as MemoryStore
from .file import FileStore as FileStore

# isort: on
from .views import EntryView as EntryView
from .views import JoinedView as JoinedView

for _name in sorted(module.name for module in pkgutil.iter_modules(__path__)):
    importlib.import_module(f"{__name__}.{_name}")
