"""`load_dense_weights`: the weights of a dense model, into a sparse one."""

import pathlib
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._values import assign, to_numpy
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.kernels import PrunableWeight
from keras_sparse_ortho.layers import plain_layer
from keras_sparse_ortho.models import beside_kernels, check_built, prunable_weights, rewrite


def load_dense_weights(
    model: keras.Model, path: str | pathlib.Path, *, skip_mismatch: bool = False
) -> dict[str, int]:
    """Loads the `.weights.h5` of the dense model into the sparse one, under its masks.

    The file is that of the model as it was before it was made sparse, or of one that was stripped.
    Every wrapped weight gets the values where its mask `M` is live, and its mask stays:

        w_e = M * w_file.

    Weights whose mask is learnt or ranked get all of the file, and then mask it as ever. All other
    weights are those of the file.

    Args:
        model: A built Keras model with wrapped layers, or layers of live blocks.
        path: A `.weights.h5` file.
        skip_mismatch: Whether to skip layers whose weights in the file have other shapes or are
            missing, as for Keras' `load_weights`, which warns. They keep their values.

    Returns:
        By path of each sparse weight that was loaded, how many values that are not zero in the
        file are dead.

    Raises:
        NotPrunableError: A model that is not built, or has no wrapped weights.
        ValueError: A file of another model, as Keras says. The model is as it was then.

    Warns:
        UserWarning: Skipped layers, as Keras says.

    Limits: the state of an optimizer is left as it is: compile the model after loading.

    Example:

    >>> import keras, os, tempfile
    >>> import keras_sparse_ortho as kso
    >>> dense = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, name="a")])
    >>> sparse = kso.sparsify(dense, 0.25, seed=0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     dense.save_weights(os.path.join(folder, "dense.weights.h5"))
    ...     kso.contrib.load_dense_weights(sparse, os.path.join(folder, "dense.weights.h5"))
    {'a/kernel': 24}
    """
    check_built(model)
    weights = prunable_weights(model, unregistered=True)
    sparse = [weight for weight in weights if weight.storage is not None]
    if not sparse:
        raise NotPrunableError(
            "The model has no masks that the weights could be loaded under; call its own "
            f"load_weights. Received: model={model.name!r}"
        )
    kernels, others = _read(model, path, {weight.path for weight in sparse}, skip_mismatch)
    for variable, value in zip(_others(model, sparse), others, strict=True):
        assign(variable, value)
    loaded = [weight for weight in sparse if weight.path in kernels]
    return {weight.path: _set(weight, kernels[weight.path]) for weight in loaded}


def _read(
    model: Any, path: Any, paths: set[str], skip_mismatch: bool
) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    """The kernels of the file by path, and the other weights; the model stays as it is."""
    plain = rewrite(model, _dense)
    kernels = [w for w in prunable_weights(plain, unregistered=True) if w.path in paths]
    if skip_mismatch:
        for weight in kernels:  # to see which are loaded
            assign(weight.variable, np.full(weight.shape, np.nan, "float32"))
    plain.load_weights(path, skip_mismatch=skip_mismatch)
    values = {weight.path: weight.value for weight in kernels}
    if skip_mismatch:
        values = {path: value for path, value in values.items() if not np.isnan(value).all()}
    return values, [to_numpy(variable) for variable in _others(plain, kernels)]


def _dense(layer: Any, path: str, own: Any) -> Any:
    return plain_layer(own)


def _others(model: Any, kernels: list[PrunableWeight]) -> list[Any]:
    """The weights but for some kernels and what stands beside them, in the order of the layers."""
    left_out = beside_kernels(model) | {id(weight.variable) for weight in kernels}
    return [variable for variable in model.weights if id(variable) not in left_out]


def _set(weight: PrunableWeight, value: np.ndarray) -> int:
    """Gives a sparse weight the values of a dense one; how many of them are dead."""
    assert weight.storage is not None
    weight.storage.assign_raw(value)
    weight.storage.settle()
    return int(np.count_nonzero(value[~weight.storage.mask_value()]))
