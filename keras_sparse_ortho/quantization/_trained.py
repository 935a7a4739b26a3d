"""What training has fixed for an integer file: integers and scales of kernels, and ranges."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._values import assign, to_numpy
from keras_sparse_ortho.kernels import PrunableWeight, walk
from keras_sparse_ortho.models import prunable_weights
from keras_sparse_ortho.quantization._fake_quantize import FakeQuantize
from keras_sparse_ortho.quantization._quantize_wrapper import QuantizeWrapper, innermost


@dataclasses.dataclass(frozen=True)
class TrainedIntegers:
    """A kernel `integers * scales` as training has left it.

    Attributes:
        path: Path of the weight.
        integers: int8, of the kernel's shape.
        scales: float32, one for each output, or one; broadcasts to that shape.
    """

    path: str
    integers: np.ndarray
    scales: np.ndarray


def trained_integers(model: keras.Model) -> list[TrainedIntegers]:
    """Those of every quantized kernel whose values are multiples of a scale."""
    pairs = ((weight.path, integers_of(weight)) for weight in prunable_weights(model))
    return [TrainedIntegers(path, *parts) for path, parts in pairs if parts is not None]


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


def fix_ranges(
    model: Any, in_integers: bool, mark: Callable[[Any, float, float], Any] | None = None
) -> None:
    """Prepares the ranges of a model for the converter, see `FakeQuantize.fix_range`."""
    for layer, _ in walk(model, ""):
        if isinstance(layer, FakeQuantize):
            layer.fix_range(in_integers, mark)


def keep_floats(model: Any) -> None:
    """Keeps TensorFlow's converter from giving ranges to what has none, layer by layer."""
    inside = {
        id(own)
        for layer, _ in walk(model, "")
        if isinstance(layer, QuantizeWrapper) and not isinstance(layer.layer, keras.layers.Wrapper)
        for own, _ in walk(innermost(layer), "")
    }
    for layer, _ in walk(model, ""):
        if isinstance(layer, QuantizeWrapper):
            layer.keep_floats(inside=id(layer) in inside)
