"""The speed record: a small file with this machine's measured token times, by model and text length.

Requests add their measurements. `auto`, `plan`, `doctor` and batches use the record to predict whether sparse attention
is faster.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from .._version import __version__
from ..caches.layers import attention_layers, token_caches
from ..entries.quantization import flat_arrays
from ..errors import SnapKVError
from ..models import type_of
from ..models.counts import hidden_size, n_query_heads
from ..paths import put
from ..sparse.options import Sparse
from .machine import processor, this_machine

# Environment variable that overrides the path of the file. If it is empty, no record is kept.
PATH_VARIABLE = "MLX_SNAPKV_SPEED_RECORD"
FORMAT = 1  # version of the file format; files in other versions are ignored
MOST_KEYS = 64  # maximum number of keys (model and method) in the file; the oldest are dropped
FORGETTING = 1 / 32  # each new measurement reduces the weight of earlier ones by this fraction
# Minimum spread of the measured lengths for fitting a slope: standard deviation relative to the mean.
SPREAD = 1 / 8

# Kinds of measurements:
DECODE_ALL = "decode_all"  # an answer token that reads all entries
DECODE_FEW = "decode_few"  # an answer token that chooses
READ_ALL = "read_all"  # a prompt token that reads all entries
READ_FEW = "read_few"  # a prompt token in a chunk that chooses
SETUP = "setup"  # building the index and the means of a prompt


class Measurement(NamedTuple):
    """A measured time in seconds, of one of the kinds above.

    `length` is the number of entries before the token or, for `SETUP`, the prompt length.
    """

    kind: str
    length: float
    seconds: float


class Line(NamedTuple):
    """A line `seconds = a + b * length` fitted to measurements.

    It is stored as weighted sums, where x is the length and y is the time in seconds. Predicted times are never
    negative and never decrease with length. If all measured lengths are about equal, the slope is unknown. It is then
    assumed to be between 0 and the slope of a line through the origin.
    """

    n: float = 0.0
    x: float = 0.0
    xx: float = 0.0
    y: float = 0.0
    xy: float = 0.0

    def with_measurements(self, length: float, seconds: float) -> Line:
        """Return the line with one more measurement."""
        new = 1.0, length, length * length, seconds, length * seconds
        return Line(*((1 - FORGETTING) * old + added for old, added in zip(self, new)))

    def least(self, length: float) -> float:
        """Return a lower bound on the seconds at a length."""
        return min(self._at(length))

    def most(self, length: float) -> float:
        """Return an upper bound on the seconds at a length."""
        return max(self._at(length))

    def _at(self, length: float) -> tuple[float, float]:
        """Return the seconds at a length with the smallest and with the largest possible slope."""
        x, y = self.x / self.n, self.y / self.n
        through_origin = y / x if x else 0.0
        variance = self.xx / self.n - x * x
        smallest, largest = 0.0, through_origin
        if x and variance >= (SPREAD * x) ** 2:
            slope = (self.xy / self.n - x * y) / variance
            smallest = largest = min(max(slope, 0.0), through_origin)
        return y + smallest * (length - x), y + largest * (length - x)


_Bound = Callable[[Line, float], float]  # `Line.least` or `Line.most`


@dataclass(frozen=True)
class Speed:
    """The fitted lines for one model and method on this machine, by kind of measurement.

    Kinds without measurements are missing.
    """

    lines: dict[str, Line] = field(default_factory=dict)

    def pays(self, few: str, every: str, length: float, worth: float = 1.0) -> bool | None:
        """Return whether tokens that read few entries take less than `worth` times as long as tokens that read all.

        Return None if one of the kinds was not measured. If a slope is unknown, assume the worst case for sparse
        attention.
        """
        if few not in self.lines or every not in self.lines:
            return None
        return self.lines[few].most(length) < worth * self.lines[every].least(length)

    def pays_from(self, few: str, every: str, lengths: Iterable[int]) -> int | None:
        """Return the first of `lengths` at which `pays` is true, or None if it never is."""
        return next((n for n in lengths if self.pays(few, every, n)), None)

    def seconds(self, n_prompt: int, n_answer: int) -> tuple[float, float] | None:
        """Predict the seconds for a prompt and its answer, with sparse attention and with the full cache.

        Return None if measurements are missing. If a slope is unknown, assume the worst case for sparse attention.
        """
        return self._seconds(n_prompt, n_answer, Line.most, Line.least)

    def loses(self, n_prompt: int, n_answer: int) -> bool:
        """Return whether sparse attention is known to be slower than the full cache.

        If prefill was not measured, only the answer is compared. If a slope is unknown, assume the best case for sparse
        attention.
        """
        predicted = self._seconds(n_prompt, n_answer, Line.least, Line.most)
        if predicted is None and {DECODE_FEW, DECODE_ALL} <= self.lines.keys():
            mean_length = n_prompt + n_answer / 2
            few, every = self.lines[DECODE_FEW], self.lines[DECODE_ALL]
            predicted = few.least(mean_length), every.most(mean_length)
        return predicted is not None and predicted[0] >= predicted[1]

    def setup_in_tokens(self, n_prompt: int) -> float:
        """Return how many answer tokens it takes until sparse attention makes up for building the index and the means.

        Return 0 if that is unknown, and infinity if sparse attention is not faster. If a slope is unknown, assume the
        best case for sparse attention.
        """
        lines = self.lines
        if not {DECODE_FEW, DECODE_ALL, SETUP} <= lines.keys():
            return 0
        saved = lines[DECODE_ALL].most(n_prompt) - lines[DECODE_FEW].least(n_prompt)
        return lines[SETUP].least(n_prompt) / saved if saved > 0 else math.inf

    def _seconds(
        self, n_prompt: int, n_answer: int, of_few: _Bound, of_all: _Bound
    ) -> tuple[float, float] | None:
        """Predict `seconds` with the bound `of_few` for sparse attention and the bound `of_all` for the full cache."""
        lines = self.lines
        if not {DECODE_FEW, DECODE_ALL, SETUP, READ_ALL} <= lines.keys():
            return None
        mean_read, mean_answered = n_prompt / 2, n_prompt + n_answer / 2
        read = n_prompt * of_all(lines[READ_ALL], mean_read)
        # Without measurements of sparse chunks, assume that the prompt is read in full.
        read_few = n_prompt * of_few(lines[READ_FEW], mean_read) if READ_FEW in lines else read
        sparse = read_few + of_few(lines[SETUP], n_prompt)
        sparse += n_answer * of_few(lines[DECODE_FEW], mean_answered)
        return sparse, read + n_answer * of_all(lines[DECODE_ALL], mean_answered)

    def with_measurements(self, measurements: Iterable[Measurement]) -> Speed:
        """Return the lines with more measurements. Times that are not positive and finite are ignored."""
        lines = dict(self.lines)
        for kind, length, seconds in measurements:
            if 0 < seconds < math.inf:
                lines[kind] = lines.get(kind, Line()).with_measurements(length, seconds)
        return Speed(lines)


def speed_of(model: Any, sparse: Sparse) -> Speed:
    """Return this machine's record for a model with sparse attention, or an empty one."""
    speeds = _read()
    return speeds.get(_key(model, sparse) or "", Speed()) if speeds else Speed()


def extend(model: Any, sparse: Sparse, measurements: list[Measurement]) -> None:
    """Add a request's measurements to the record. Do nothing if the file can't be written."""
    path = record_path()
    key = _key(model, sparse) if path is not None and measurements else None
    if path is None or key is None:
        return
    speeds = _read()
    speeds[key] = speeds.pop(key, Speed()).with_measurements(
        measurements
    )  # pop and reinsert, so that the latest key is last
    latest = list(speeds.items())[-MOST_KEYS:]
    content = {"format": FORMAT, "speeds": {key: speed.lines for key, speed in latest}}
    with contextlib.suppress(OSError, ValueError):
        path.parent.mkdir(parents=True, exist_ok=True)
        put(path, json.dumps(content, indent=1))


def record_path() -> Path | None:
    """Return the path of the record, by default in the user's cache folder. Return None if no record is kept."""
    given = os.environ.get(PATH_VARIABLE)
    if given is not None:
        return Path(given) if given else None
    caches = "~/Library/Caches" if sys.platform == "darwin" else "~/.cache"
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser(caches)
    return Path(folder) / "mlx-snapkv" / "speed.json"


def _read() -> dict[str, Speed]:
    """Read the record. Return an empty dict if there is no readable file in this format."""
    path = record_path()
    if path is None:
        return {}
    try:
        content = json.loads(path.read_text())
        if content["format"] != FORMAT:
            return {}
        return {
            key: Speed({kind: _parse_line(sums) for kind, sums in lines.items()})
            for key, lines in content["speeds"].items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}


def _parse_line(sums: Any) -> Line:
    """Parse the weighted sums of a `Line`. Raises: ValueError, TypeError: no measurements can have these sums."""
    line = Line(*map(float, sums))
    if not all(map(math.isfinite, line)) or line.n <= 0 or line.y <= 0:
        raise ValueError("no measurements have these sums")
    return line


def _key(model: Any, sparse: Sparse) -> str | None:
    """Return the key for measurements, which names the machine, the versions, the model's shape and the method.

    Return None if the model's shape can't be determined.
    """
    try:
        shape = _shape(model)
    except (SnapKVError, AttributeError, ValueError):
        return None
    machine = [processor(), str(mx.default_device()), str(this_machine().memory)]
    versions = [f"mlx {version('mlx')}", f"mlx-snapkv {__version__}"]
    method = str(replace(sparse, when="faster"))
    return "; ".join([*machine, *versions, *shape, method])


def _shape(model: Any) -> list[str]:
    """Describe the shape of a model. Raises: SnapKVError: the model does not support sparse attention."""
    caches = token_caches(model)
    layers = attention_layers(model, caches)
    keys = flat_arrays(layers[0].layer_cache_in(caches).sample_entries)[0]
    n_kv_heads, head_dim = keys.shape[1], keys.shape[3]
    group = n_query_heads(layers[0].attention) // n_kv_heads
    return [
        f"{type_of(model)} of {len(model.layers)} layers, {len(layers)} full",
        f"{n_kv_heads} heads x {group} x {head_dim}, {keys.dtype}",
        f"hidden {hidden_size(model)}, {_bits(model)} bits",
    ]


def _bits(model: Any) -> int:
    """Return the bits per weight: the minimum over quantised modules, or those of the largest unquantised weight."""
    bits = [x.bits for x in model.modules() if "scales" in x and hasattr(x, "bits")]
    if bits:
        return min(bits)
    weights = [x["weight"] for x in model.modules() if "weight" in x]
    return 8 * max(weights, key=lambda x: x.size).dtype.size if weights else 0
