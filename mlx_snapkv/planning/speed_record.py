"""The speed record: a small file of times measured on this machine, for each model and sparse setting.

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
from .entry_sizes import weight_bytes
from .machine import processor, this_machine

# Environment variable that overrides the path of the file. If the variable is an empty string, no record is kept.
PATH_VARIABLE = "MLX_SNAPKV_SPEED_RECORD"
FORMAT = 1  # version of the file format; files with another version are ignored
# Maximum number of keys in the file. The keys that were updated least recently are dropped.
MAX_KEYS = 64
FORGETTING_RATE = 1 / 32  # each new measurement reduces the weight of earlier ones by this fraction
# Minimum standard deviation of the measured lengths, relative to their mean, for fitting a slope.
MIN_SPREAD = 1 / 8

# Kinds of measurements. The names are part of the file format.
DECODE_FULL = "decode_all"  # an answer token that reads all entries
DECODE_SPARSE = "decode_few"  # an answer token that reads only the entries it chooses
SETUP = "setup"  # building the index and the cluster means of a prompt


class Measurement(NamedTuple):
    """A measured time.

    Attributes:
        kind: what was timed, such as `DECODE_FULL`.
        length: number of entries before the token. For `SETUP`, the prompt length.
        seconds: time in seconds.
    """

    kind: str
    length: float
    seconds: float


class Line(NamedTuple):
    """A line `seconds = a + b * length` fitted to measurements.

    The line is stored as weighted sums over the measurements, where x is the length and y is the time in seconds. Older
    measurements weigh less (`FORGETTING_RATE`). Predicted times are never negative and never decrease with length. If
    all measured lengths are about equal, the slope is unknown. An unknown slope is assumed to be between 0 and the
    slope of the line from the origin through the mean of the measurements.
    """

    weight: float = 0.0
    sum_x: float = 0.0
    sum_xx: float = 0.0
    sum_y: float = 0.0
    sum_xy: float = 0.0

    def with_measurement(self, length: float, seconds: float) -> Line:
        """Return the line with one more measurement."""
        new_terms = 1.0, length, length * length, seconds, length * seconds
        sums = [(1 - FORGETTING_RATE) * old_sum + term for old_sum, term in zip(self, new_terms)]
        return Line(*sums)

    def lower_bound(self, length: float) -> float:
        """Return a lower bound on the time at `length`, in seconds."""
        return min(self._bounds(length))

    def upper_bound(self, length: float) -> float:
        """Return an upper bound on the time at `length`, in seconds."""
        return max(self._bounds(length))

    def _bounds(self, length: float) -> tuple[float, float]:
        """Return two predicted times at `length`, in seconds: with the smallest and with the largest possible slope."""
        mean_x, mean_y = self.sum_x / self.weight, self.sum_y / self.weight
        smallest_slope, largest_slope = self._slopes(mean_x, mean_y)
        distance = length - mean_x
        return mean_y + smallest_slope * distance, mean_y + largest_slope * distance

    def _slopes(self, mean_x: float, mean_y: float) -> tuple[float, float]:
        """Return the smallest and the largest possible slope.

        Both are the fitted slope if the measured lengths differ enough.
        """
        slope_through_origin = mean_y / mean_x if mean_x else 0.0
        variance = self.sum_xx / self.weight - mean_x * mean_x
        if mean_x and variance >= (MIN_SPREAD * mean_x) ** 2:
            covariance = self.sum_xy / self.weight - mean_x * mean_y
            slope = min(max(covariance / variance, 0.0), slope_through_origin)
            return slope, slope
        return 0.0, slope_through_origin


_Bound = Callable[[Line, float], float]  # `Line.lower_bound` or `Line.upper_bound`


class PredictedSeconds(NamedTuple):
    """The predicted time of an answer, with sparse attention and with the full cache.

    With sparse attention, it includes the setup. The time of the prompt is left out, because by default both read it in
    full.
    """

    sparse: float
    full: float


@dataclass(frozen=True)
class Speed:
    """The fitted lines for one model and sparse setting on this machine, by kind of measurement.

    Kinds without measurements are omitted.
    """

    lines: dict[str, Line] = field(default_factory=dict)

    def is_sparse_faster(self, length: float) -> bool:
        """Return whether an answer token takes less time with sparse attention than with the full cache.

        Both kinds must have been measured. If a slope is unknown, the slowest possible sparse attention is compared
        with the fastest possible full cache.
        """
        sparse_seconds = self.lines[DECODE_SPARSE].upper_bound(length)
        return sparse_seconds < self.lines[DECODE_FULL].lower_bound(length)

    def predict_seconds(self, n_prompt: int, n_answer: int) -> PredictedSeconds | None:
        """Predict how long an answer takes, with sparse attention and with the full cache.

        Return None if measurements are missing. If a slope is unknown, predict the longest possible time for sparse
        attention and the shortest for the full cache.
        """
        return self._predict(n_prompt, n_answer, Line.upper_bound, Line.lower_bound)

    def is_sparse_slower(self, n_prompt: int, n_answer: int, has_index: bool = False) -> bool:
        """Return whether an answer is known to take longer with sparse attention than with the full cache.

        If the setup was not measured, it is left out. If a slope is unknown, the fastest possible sparse attention is
        compared with the slowest possible full cache.

        Args:
            n_prompt: prompt length in tokens.
            n_answer: answer length in tokens.
            has_index: whether an earlier turn has built the index, so that there is no setup.
        """
        predicted = None
        if not has_index:
            predicted = self._predict(n_prompt, n_answer, Line.lower_bound, Line.upper_bound)
        if predicted is None and {DECODE_SPARSE, DECODE_FULL} <= self.lines.keys():
            mean_length = n_prompt + n_answer / 2
            predicted = PredictedSeconds(
                sparse=self.lines[DECODE_SPARSE].lower_bound(mean_length),
                full=self.lines[DECODE_FULL].upper_bound(mean_length),
            )
        return predicted is not None and predicted.sparse > predicted.full

    def tokens_to_repay_setup(self, n_prompt: int) -> float:
        """Return how many answer tokens it takes to make up for the setup time (`SETUP`).

        Return 0 if measurements are missing, and infinity if sparse attention is not faster. If a slope is unknown, the
        fastest possible sparse attention is compared with the slowest possible full cache.
        """
        lines = self.lines
        if not {DECODE_SPARSE, DECODE_FULL, SETUP} <= lines.keys():
            return 0
        full_seconds = lines[DECODE_FULL].upper_bound(n_prompt)
        sparse_seconds = lines[DECODE_SPARSE].lower_bound(n_prompt)
        if sparse_seconds >= full_seconds:
            return math.inf
        return lines[SETUP].lower_bound(n_prompt) / (full_seconds - sparse_seconds)

    def _predict(
        self, n_prompt: int, n_answer: int, sparse_bound: _Bound, full_bound: _Bound
    ) -> PredictedSeconds | None:
        """Predict the time of an answer, with the given bounds for sparse and full attention.

        Return None if measurements are missing.
        """
        lines = self.lines
        if not {DECODE_SPARSE, DECODE_FULL, SETUP} <= lines.keys():
            return None
        mean_length = n_prompt + n_answer / 2  # mean number of entries before an answer token
        setup = sparse_bound(lines[SETUP], n_prompt)
        return PredictedSeconds(
            sparse=setup + n_answer * sparse_bound(lines[DECODE_SPARSE], mean_length),
            full=n_answer * full_bound(lines[DECODE_FULL], mean_length),
        )

    def with_measurements(self, measurements: Iterable[Measurement]) -> Speed:
        """Return a copy with the measurements added. Times that are not positive and finite are ignored."""
        lines = dict(self.lines)
        for kind, length, seconds in measurements:
            if 0 < seconds < math.inf:
                lines[kind] = lines.get(kind, Line()).with_measurement(length, seconds)
        return Speed(lines)


def speed_of(model: Any, sparse: Sparse) -> Speed:
    """Return this machine's speeds for a model with the setting `sparse`.

    Return an empty `Speed` if nothing was measured.
    """
    speeds = _load_record()
    if not speeds:
        return Speed()
    key = _record_key(model, sparse)
    return Speed() if key is None else speeds.get(key, Speed())


def record_measurements(model: Any, sparse: Sparse, measurements: list[Measurement]) -> None:
    """Add a request's measurements to the record.

    Do nothing if no record is kept, the model's shape can't be determined, or the file can't be written.
    """
    path = record_path()
    if path is None or not measurements:
        return
    key = _record_key(model, sparse)
    if key is None:
        return
    speeds = _load_record()
    earlier_speed = speeds.pop(key, Speed())
    # Insert the key at the end, because the first keys are dropped if there are too many.
    speeds[key] = earlier_speed.with_measurements(measurements)
    latest_speeds = list(speeds.items())[-MAX_KEYS:]
    content = {"format": FORMAT, "speeds": {key: speed.lines for key, speed in latest_speeds}}
    with contextlib.suppress(OSError, ValueError):
        path.parent.mkdir(parents=True, exist_ok=True)
        put(path, json.dumps(content, indent=1))


def record_path() -> Path | None:
    """Return the path of the record, by default in the user's cache folder. Return None if no record is kept."""
    users_path = os.environ.get(PATH_VARIABLE)
    if users_path is not None:
        return Path(users_path) if users_path else None
    default_folder = "~/Library/Caches" if sys.platform == "darwin" else "~/.cache"
    cache_folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser(default_folder)
    return Path(cache_folder) / "mlx-snapkv" / "speed.json"


def _load_record() -> dict[str, Speed]:
    """Read the record. Return an empty dict if the file is missing, broken or in another format."""
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
    except (
        OSError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        OverflowError,
        RecursionError,
    ):
        return {}


def _parse_line(sums: Any) -> Line:
    """Parse the weighted sums of a `Line`.

    Raises: ValueError, TypeError, OverflowError: the sums can't come from measurements.
    """
    line = Line(*map(float, sums))
    if not all(map(math.isfinite, line)) or line.weight <= 0 or line.sum_y <= 0:
        raise ValueError("no measurements have these sums")
    return line


def _record_key(model: Any, sparse: Sparse) -> str | None:
    """Return the key for measurements: the machine, versions, model shape and sparse setting.

    Return None if the model's shape can't be determined.
    """
    try:
        shape_texts = _describe_shape(model)
    except (SnapKVError, AttributeError, ValueError):
        return None
    machine = [processor(), str(mx.default_device()), str(this_machine().memory)]
    versions = [f"mlx {version('mlx')}", f"mlx-snapkv {__version__}"]
    # Only answer tokens are measured, so it does not matter how prompts are read.
    method = str(replace(sparse, when="faster", read=None, read_top_k=None))
    return "; ".join([*machine, *versions, *shape_texts, method])


def _describe_shape(model: Any) -> list[str]:
    """Describe the shape of a model. Raises: SnapKVError: the model can't be compressed."""
    caches = token_caches(model)
    layers = attention_layers(model, caches)
    keys, *_ = flat_arrays(layers[0].layer_cache_in(caches).sample_entries)
    n_kv_heads, head_dim = keys.shape[1], keys.shape[3]
    group_size = n_query_heads(layers[0].attention) // n_kv_heads
    return [
        f"{type_of(model)} of {len(model.layers)} layers, {len(layers)} full",
        f"{n_kv_heads} heads x {group_size} x {head_dim}, {keys.dtype}",
        f"hidden {hidden_size(model)}, {weight_bytes(model)} bytes",
    ]
