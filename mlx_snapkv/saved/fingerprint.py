"""Telling one model's weights from another's, quickly."""

import hashlib

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

SAMPLES = 64  # values looked at per parameter


def fingerprint(model) -> str:
    """A hash of a loaded model: its class and configuration, and every parameter's name, shape, dtype and some values.

    At most `SAMPLES` values of each parameter are read, evenly spaced, so that it is as quick for a large model.
    Training changes them all; an edit of single weights in between goes unseen.
    """
    parameters = sorted(dict(tree_flatten(model.parameters())).items())
    samples = [_sample(values) for _, values in parameters]
    mx.eval(samples)
    digest = hashlib.sha256(f"{type(model)} {getattr(model, 'args', None)!r}".encode())
    for (name, values), sample in zip(parameters, samples):
        digest.update(f"{name} {values.shape} {values.dtype}".encode())
        digest.update(np.asarray(sample).tobytes())
    return digest.hexdigest()


def _sample(values: mx.array) -> mx.array:
    """Some values' bytes, uint8."""
    n = min(SAMPLES, values.size)
    places = [i * (values.size - 1) // max(1, n - 1) for i in range(n)]
    return values.reshape(-1)[mx.array(places, mx.int64)].view(mx.uint8)
