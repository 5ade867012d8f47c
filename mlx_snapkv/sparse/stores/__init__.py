"""Stores that keep entries for sparse attention, one module per kind of store."""

import importlib
import pkgutil

from .base import STORES as STORES
from .base import EntryView as EntryView
from .base import JoinedView as JoinedView
from .base import Store as Store

# Imported in this order, so that in-memory stores come first in `STORES`.
# isort: off
from .memory import MemoryStore as MemoryStore
from .file import FileStore as FileStore

# isort: on

for _name in sorted(module.name for module in pkgutil.iter_modules(__path__)):
    importlib.import_module(f"{__name__}.{_name}")
