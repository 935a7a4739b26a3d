"""`jacobian_singular_values`: the spectrum of the input-output Jacobian."""

from typing import Any

import numpy as np

from keras_sparse_ortho._checks import check_integer
from keras_sparse_ortho.analysis._bidiagonalization import bidiagonalize
from keras_sparse_ortho.analysis._jacobian_products import JacobianProducts
from keras_sparse_ortho.analysis._jacobian_spectrum import JacobianSpectrum

# Up to here all products with unit vectors, and a dense SVD, take seconds.
_EXACT_SIDE = 1024
_EXACT_ENTRIES = 2**24


def jacobian_singular_values(
    model: Any,
    x: Any,
    *,
    method: str = "auto",
    steps: int = 64,
    seed: int = 0,
) -> JacobianSpectrum:
    """Singular values of `J = d output / d input` for every sample, in inference.

    *Exact*: all rows (or columns, if these are fewer) by products with unit vectors, and a dense
    SVD. *Lanczos*: Golub-Kahan bidiagonalization with full reorthogonalization from a random
    vector, `steps` products with `J` and with `J^T`. Its values are Ritz values, and their weights
    those of a Gauss quadrature of the spectrum, so that mean and quantiles are estimated, too: the
    largest value usually to many digits, the smallest from above, the mean with a relative spread
    of about `1 / sqrt(min(inputs, outputs))` a sample.

    Args:
        model: A built Keras model or layer of one input and one output.
        x: Float inputs of shape `(samples, ...)`.
        method: `"exact"`, `"lanczos"`, or `"auto"`: exact up to 1024 for the smaller side and 2^24
            entries.
        steps: Steps of Lanczos, for each sample.
        seed: For the random vectors of Lanczos.

    Returns:
        A `JacobianSpectrum` with `values`, `mean`, `min`, `max`, `quantiles(q)` and `plot()`.

    Raises:
        NotPrunableError: A model that is not built, or has several inputs or outputs.
        ValueError: Integer inputs, no samples, a method that is not known.

    Limits: products are computed in float32 (`keras.config.floatx()`), so values below about 1e-6
    of the largest are rounding. Samples must not see each other (no batch statistics).

    Example:

    >>> import keras, numpy as np
    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, use_bias=False)])
    >>> model.layers[0].set_weights([np.array([[3.0, 0.0], [0.0, 2.0], [0.0, 0.0]])])
    >>> jacobian_singular_values(model, np.ones((1, 3))).values.round(6).tolist()
    [[3.0, 2.0]]

    Reference:

    - Pennington, Schoenholz and Ganguli, "Resurrecting the sigmoid in deep learning through
      dynamical isometry" (NeurIPS 2017), arXiv 1711.04735
    """
    if method not in ("auto", "exact", "lanczos"):
        raise ValueError(
            f'`method` must be "auto", "exact" or "lanczos". Received: method={method!r}'
        )
    steps = check_integer("steps", steps)
    products = JacobianProducts(model, x)
    few, many = sorted((products.inputs, products.outputs))
    if method == "auto":
        method = "exact" if few <= _EXACT_SIDE and few * many <= _EXACT_ENTRIES else "lanczos"
    shape = (products.outputs, products.inputs)
    if method == "lanczos":
        values, weights = _by_lanczos(products, min(steps, few), seed)
        return JacobianSpectrum(values, weights, False, shape)
    values = np.linalg.svd(_matrices(products), compute_uv=False)
    return JacobianSpectrum(values, np.full(values.shape, 1 / few), True, shape)


def _matrices(products: JacobianProducts) -> np.ndarray:
    """All Jacobians, or their transposes."""
    few = min(products.inputs, products.outputs)
    unit = np.broadcast_to(np.eye(few), (products.samples, few, few))
    if products.outputs <= products.inputs:
        return products.backward(unit)
    return products.forward(unit)


def _by_lanczos(products: JacobianProducts, steps: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    def forward(u: np.ndarray) -> np.ndarray:
        return products.forward(u[:, None])[:, 0]

    def backward(v: np.ndarray) -> np.ndarray:
        return products.backward(v[:, None])[:, 0]

    rng = np.random.default_rng(seed)
    # From the smaller side, where there are no zeros that only the shape is the reason for.
    if products.inputs <= products.outputs:
        start = rng.normal(size=(products.samples, products.inputs))
        return bidiagonalize(forward, backward, start, products.outputs, steps)
    start = rng.normal(size=(products.samples, products.outputs))
    return bidiagonalize(backward, forward, start, products.inputs, steps)
