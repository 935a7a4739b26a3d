"""Kinds of layers: base classes of this package's, for the walk over a model, and Keras' cells."""

from collections.abc import Mapping

import keras

from keras_sparse_ortho.kernels._storage import PrunableWeight, Storage


class SparseLayer:
    """Base of layers that hold kernels in storages; subclasses implement both methods."""

    def storages(self) -> Mapping[str, Storage]:
        """The storages of its kernels, by their names below the layer; empty before it is built."""
        raise NotImplementedError

    def to_dense_layer(self) -> keras.layers.Layer:
        """The plain layer, built, with the effective weights; a wrapper gives up its layer."""
        raise NotImplementedError


class LayerWrapper:
    """Base of wrappers that add nothing to the paths of the weights in their `layer`."""

    layer: keras.layers.Layer

    @property
    def prunable_weights(self) -> list[PrunableWeight]:
        """The kernels that the wrapper changes."""
        raise NotImplementedError


class WholeLayer:
    """Base of layers whose inner layers are parts of them: the walk does not look inside."""


def is_sparse_layer(layer: keras.layers.Layer) -> bool:
    """Whether a layer holds kernels in storages."""
    return isinstance(layer, SparseLayer)


def is_wrapper(layer: keras.layers.Layer) -> bool:
    """Whether a layer wraps another one without a place of its own in paths."""
    return isinstance(layer, LayerWrapper)


def storages_of(layer: keras.layers.Layer) -> Mapping[str, Storage]:
    """The storages of a layer's own kernels by name; empty for plain layers."""
    return layer.storages() if isinstance(layer, SparseLayer) else {}


def has_dropout_rates(layer: keras.layers.Layer) -> bool:
    """Whether a layer is a recurrent cell with rates of dropout, `dropout` and `recurrent_dropout`.

    The layer around a cell, and a wrapper around that, show the same rates, but only read them.
    """
    if isinstance(layer, keras.layers.RNN | LayerWrapper):
        return False
    return hasattr(layer, "recurrent_dropout")
