"""Copies the weights of a model with pruning wrappers into the same model without them."""

import itertools
from collections.abc import Sequence

from keras_sparse_ortho._types import AnyLayer
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.tfmot._tf_keras_internals import (
    PruneLowMagnitude,
    own_weights,
)
from keras_sparse_ortho.tfmot._weights import prunable_weights, walk


def copy_weights(model: AnyLayer, plain: AnyLayer) -> None:
    """Copies the weights of a model with wrappers into the same model without them.

    For subclassed models: TFMOT's `strip_pruning` takes none. Kernels get their effective values,
    so dead entries are exactly 0, and the outputs are those of `model`.

    Args:
        model: tf_keras Model with wrappers around some layers. It is not changed.
        plain: tf_keras Model with the same layers in the same order, without wrappers, called once
            on an input.

    Raises:
        NotPrunableError: A Keras 3 or unbuilt model; layers that only one of the two has, or that
            have weights of other shapes. `plain` is then as before.

    Examples:
        >>> import numpy as np, keras_sparse_ortho as kso
        >>> tf_keras = kso.tfmot.register_initializers()
        >>> class Net(tf_keras.Model):
        ...     def __init__(self, density=None):
        ...         super().__init__()
        ...         self.hidden = tf_keras.layers.Dense(16, name="hidden")
        ...         if density is not None:
        ...             self.hidden = kso.tfmot.PruneWithMask(self.hidden, density=density)
        ...
        ...     def call(self, x):
        ...         return self.hidden(x)
        >>> x = np.ones((1, 16), "float32")
        >>> masked, plain = Net(0.25), Net()
        >>> bool(np.abs(masked(x) - plain(x)).max() > 0.1)
        True
        >>> kso.tfmot.copy_weights(masked, plain)
        >>> bool(np.abs(masked(x) - plain(x)).max() < 1e-6)
        True
    """
    effective = {
        id(weight.variable): weight.value for weight in prunable_weights(model)
    }
    prunable_weights(plain)  # raises for models that are not built
    sources = _layers(model)
    targets = _layers(plain)
    _check_equal(sources, targets)
    for (source, _), (target, _) in zip(sources, targets, strict=True):
        pairs = zip(own_weights(target), own_weights(source), strict=True)
        for variable, new in pairs:
            variable.assign(effective.get(id(new), new))


def _layers(model: AnyLayer) -> list[tuple[AnyLayer, str]]:
    """All layers with their paths, in the order of attributes; the wrapped ones, not wrappers.

    The order pairs the layers of two models, whose names may have different numbers.
    """
    layers: list[tuple[AnyLayer, str]] = []
    for layer, path in walk(model, ""):
        if isinstance(layer, PruneLowMagnitude):
            layers += walk(layer.layer, path)
        else:
            layers.append((layer, path))
    return layers


def _check_equal(
    sources: Sequence[tuple[AnyLayer, str]],
    targets: Sequence[tuple[AnyLayer, str]],
) -> None:
    """Raises if two models have not the same layers with weights of the same shapes."""
    for source, target in itertools.zip_longest(sources, targets):
        of_model = _described(source)
        of_plain = _described(target)
        if of_model != of_plain:
            raise NotPrunableError(
                "`plain` must have the layers of `model`, with weights of the same shapes. "
                f"Received: {of_model} in `model`, {of_plain} in `plain`"
            )


def _described(place: tuple[AnyLayer, str] | None) -> str:
    """The class of a layer and the shapes of its weights."""
    if place is None:
        return "no layer"
    layer, path = place
    name = path.rpartition("/")[2].rstrip("_0123456789")
    shapes = [tuple(weight.shape) for weight in own_weights(layer)]
    return f"{type(layer).__name__} {name!r} with weights {shapes}"
