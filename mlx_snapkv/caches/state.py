"""What a file holds of our caches.

mlx-lm saves arrays, numbers and strings, numbers in single precision. So a state is one string and a cache's arrays.
"""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, ClassVar

import mlx.core as mx

from ..entries.quantization import Quantization
from ..entries.queries import Recorder
from ..policies import Policy, resolve_policy
from ..policies.budgets import Quota
from .compaction import Compaction

_DECODERS = {
    "policy": lambda text: resolve_policy(policy=text),
    "quantization": lambda how: Quantization(*how),
    "compaction": lambda how: Compaction(*how),
    "quota": lambda numbers: Quota(*numbers),
    "_steady": lambda ends: range(*ends),
}


class SavedState(Recorder):
    """mlx-lm's `state` of a recording cache: all its attributes but the transient, which are as in a new one."""

    TRANSIENT: ClassVar[frozenset[str]] = frozenset({"layer", "_by_reader", "_mark"})

    @property
    def state(self) -> tuple:
        lasting = {name: x for name, x in vars(self).items() if name not in self.TRANSIENT}
        arrays = {name: x for name, x in lasting.items() if _is_array(x)}
        kinds = {name: type(x).__name__ for name, x in arrays.items()}
        others = {name: x for name, x in lasting.items() if name not in arrays}
        return json.dumps([kinds, others], default=_encoded), *arrays.values()

    @state.setter
    def state(self, v: Sequence) -> None:
        self.start_recording()
        kinds, others = json.loads(v[0])
        for (name, kind), value in zip(kinds.items(), v[1:], strict=True):
            setattr(self, name, tuple(value) if kind == "tuple" else value)
        for name, value in others.items():
            decode = _DECODERS.get(name)
            setattr(self, name, value if decode is None or value is None else decode(value))


def _is_array(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return bool(value) and all(map(_is_array, value))
    return isinstance(value, mx.array)


def _encoded(value: Any) -> Any:
    if isinstance(value, Policy):
        return str(value)
    if isinstance(value, range):
        return value.start, value.stop
    return dataclasses.astuple(value)
