"""One operation of a graph."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class Operation:
    """One operation: the names of the arrays that it reads and makes, and its arguments, if it has any."""

    name: str
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    arguments: Any = None
