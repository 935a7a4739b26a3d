"""What training has fixed for an integer file: scales of kernels, and ranges of activations."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._values import assign, to_numpy
from keras_sparse_ortho.kernels import PrunableWeight, walk
from keras_sparse_ortho.models import prunable_weights
from keras_sparse_ortho.quantization._fake_quantize import FakeQuantize


def integers_of(weight: PrunableWeight) -> tuple[np.ndarray, np.ndarray] | None:
    """Integers and scales of a weight, `None` for one that has none."""
    quantizer = None if weight.storage is None else weight.storage.quantizer
    if quantizer is None:
        return None
    parts: tuple[np.ndarray, np.ndarray] | None
    parts = quantizer.integers(weight.value, weight.outputs_shape)
    return parts


def has_trained_ranges(model: keras.Model) -> bool:
    """Whether the activations of a model have ranges; raises if training has not set one."""
    layers = [layer for layer, _ in walk(model, "") if isinstance(layer, FakeQuantize)]
    unset = [layer.path for layer in layers if not layer.built or not float(to_numpy(layer.seen))]
    if unset:
        raise ValueError(
            "The ranges of activations are set in training: train the model, or call it once on "
            f"real data with training=True. Received: no range of {unset[:5]}"
        )
    return bool(layers)


@contextlib.contextmanager
def without_ranges(model: keras.Model) -> Iterator[None]:
    """Inside, the activations of a model are not rounded."""
    known = [layer.seen for layer, _ in walk(model, "") if isinstance(layer, FakeQuantize)]
    before = [float(to_numpy(seen)) for seen in known]
    for seen in known:
        assign(seen, 0.0)
    try:
        yield
    finally:
        for seen, value in zip(known, before, strict=True):
            assign(seen, value)


@contextlib.contextmanager
def fixed_ranges(model: Any, mark: Callable[[Any, float, float], Any] | None) -> Iterator[None]:
    """Inside, a model can be traced for the converter, see `FakeQuantize.fixed_range`."""
    with contextlib.ExitStack() as stack:
        for layer, _ in walk(model, ""):
            if isinstance(layer, FakeQuantize):
                stack.enter_context(layer.fixed_range(mark))
        yield


def has_integers(model: Any) -> bool:
    """Whether training has rounded a kernel."""
    return any(integers_of(weight) is not None for weight in prunable_weights(model))
