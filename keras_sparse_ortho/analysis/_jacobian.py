"""`jacobian_singular_values`: the spectrum of the input-output Jacobian."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._backend import compiled, second_derivatives, value_and_gradients
from keras_sparse_ortho._checks import check_integer
from keras_sparse_ortho._keras_internals import VariableOverrides
from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.models import check_built, from_zero_states

# Up to here, all products with unit vectors and a dense SVD take seconds.
_EXACT_SIDE = 1024
_EXACT_ENTRIES = 2**24
# Entries in one batch of products: enough to fill the cores, about 64 MiB in float32.
_LARGEST_BATCH = 2**24
# A norm that is zero up to rounding, relative to the largest entry: products are float32.
_EXHAUSTED = 1e-6

Product = Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False)
class JacobianSpectrum:
    """Singular values of a Jacobian, or estimates of them: see `jacobian_singular_values`.

    Args:
        values: Singular values of shape `(samples, count)`, descending.
        weights: The fraction of the sample's `min(inputs, outputs)` singular values that each
            value represents, of the same shape; every row sums to 1.
        exact: Whether these are all the singular values, with equal weights.
        shape: `(outputs, inputs)` of the Jacobian.
    """

    values: np.ndarray
    weights: np.ndarray
    exact: bool
    shape: tuple[int, int]

    @property
    def mean(self) -> float:
        """Mean singular value, over all values and samples."""
        return float((self.values * self.weights).sum(axis=1).mean())

    @property
    def max(self) -> float:
        """Largest singular value, averaged over samples."""
        return float(self.values.max(axis=1).mean())

    @property
    def min(self) -> float:
        """Smallest singular value, averaged over samples; an upper bound if not `exact`."""
        return float(self.values.min(axis=1).mean())

    def quantiles(self, q: float | Sequence[float]) -> np.ndarray:
        """The least values, pooled over samples, that fractions `q` of all values do not exceed."""
        fractions = np.asarray(q, dtype="float64")
        if not ((fractions >= 0) & (fractions <= 1)).all():
            raise ValueError(f"`q` must hold fractions in [0, 1]. Received: q={q!r}")
        values, weights = self.values.reshape(-1), self.weights.reshape(-1)
        order = np.argsort(values)
        share = np.cumsum(weights[order]) / weights.sum()
        # Rounding of the sum must not push a quantile to the next value.
        index = np.searchsorted(share, fractions - 1e-12)
        return values[order][np.minimum(index, len(values) - 1)]

    def __repr__(self) -> str:
        kind = "exact" if self.exact else "estimated"
        low, middle, high = self.quantiles([0.1, 0.5, 0.9])
        return (
            f"<JacobianSpectrum {kind}, {len(self.values)} samples, shape={self.shape}: "
            f"mean {self.mean:.6g}, min {self.min:.6g}, max {self.max:.6g}, "
            f"quantiles (.1, .5, .9) {low:.6g}, {middle:.6g}, {high:.6g}>"
        )


def jacobian_singular_values(
    model: Any,
    x: Any,
    *,
    method: str = "auto",
    steps: int = 64,
    seed: int = 0,
) -> JacobianSpectrum:
    """Singular values of `J = d output / d input` for every sample, in inference.

    *Exact*: all rows (or columns, if there are fewer) by products with unit vectors, and a dense
    SVD. *Lanczos*: Golub-Kahan bidiagonalization with full reorthogonalization from a random
    vector. Its Ritz values are weighted as in a Gauss quadrature of the spectrum: the largest value
    is usually right to many digits, the smallest is an upper bound, and the mean has a relative
    spread of about `1 / sqrt(min(inputs, outputs))` per sample.

    Args:
        model: A built Keras model or layer with one input and one output.
        x: Float inputs of shape `(samples, ...)`.
        method: `"exact"`, `"lanczos"`, or `"auto"`: exact if the smaller side has at most 1024
            entries and the Jacobian at most 2^24.
        steps: Lanczos steps: products with `J` and with `J^T` for each sample.
        seed: For the random vectors of Lanczos.

    Returns:
        A `JacobianSpectrum` with `values`, `weights`, `mean`, `min`, `max` and `quantiles(q)`.

    Raises:
        NotPrunableError: A model that is not built, or has several inputs or outputs.
        ValueError: Integer inputs, no samples, an unknown method.

    Limits: products are computed in float32 (`keras.config.floatx()`), so values below about 1e-6
    of the largest are rounding. Samples must not affect each other (no batch statistics).

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
    products = _JacobianProducts(model, x)
    rows, columns = shape = (products.outputs, products.inputs)
    few, many = sorted(shape)
    if method == "auto":
        method = "exact" if few <= _EXACT_SIDE and few * many <= _EXACT_ENTRIES else "lanczos"
    if method == "exact":
        unit = np.broadcast_to(np.eye(few), (products.samples, few, few))
        found = products.backward(unit) if rows <= columns else products.forward(unit)
        values = np.linalg.svd(found, compute_uv=False)
        return JacobianSpectrum(values, np.full(values.shape, 1 / few), True, shape)
    forward, backward = products.forward, products.backward
    if rows < columns:  # start on the smaller side, which has no zeros due to the shape alone
        forward, backward = backward, forward
    start = np.random.default_rng(seed).normal(size=(products.samples, few))
    values, weights = bidiagonalize(
        lambda v: forward(v[:, None])[:, 0],
        lambda u: backward(u[:, None])[:, 0],
        start,
        many,
        min(steps, few),
    )
    return JacobianSpectrum(values, weights, False, shape)


class _JacobianProducts:
    """`J u` and `J^T v` for every sample of `x`, with inputs and outputs flattened."""

    def __init__(self, model: Any, x: Any) -> None:
        check_built(model)
        inputs = keras.tree.flatten(x)
        if len(inputs) != 1:
            raise NotPrunableError(
                f"Jacobians are computed for models with one input. Received: {len(inputs)} inputs"
            )
        (x,) = inputs
        x = x if isinstance(x, np.ndarray) else to_numpy(x)  # the backend may narrow its dtype
        if x.ndim < 1 or len(x) == 0 or not np.issubdtype(x.dtype, np.floating):
            raise ValueError(
                "`x` must hold float inputs, at least one sample; integers have no derivative "
                "(pass the part of the model after the embedding). "
                f"Received: x of shape {x.shape} and dtype {x.dtype}"
            )
        self._model = model
        self._x = x.astype(keras.config.floatx())
        self._states = [v for v in model.variables if keras.backend.is_float_dtype(v.dtype)]
        xla = keras.backend.backend() == "jax"  # on TensorFlow it takes longer than the products
        outputs = self._run(compiled(self._outputs, xla=xla), self._x[:1])
        self._output_shape = outputs.shape[1:]
        self.samples = len(x)
        self.inputs = int(np.prod(x.shape[1:], dtype=np.int64))
        self.outputs = int(np.prod(self._output_shape, dtype=np.int64))
        # From vectors `(samples, count, inputs)` to `(samples, count, outputs)`, and back.
        forward, backward = (
            compiled(function, xla=xla)
            for function in (self._jacobian_times, self._transpose_times)
        )
        self.forward = functools.partial(self._products, forward, x.shape[1:])
        self.backward = functools.partial(self._products, backward, self._output_shape)

    def _products(self, step: Any, shape: tuple[int, ...], vectors: np.ndarray) -> np.ndarray:
        samples, count, _ = vectors.shape
        # Chunks of equal size, so that at most two programs are compiled.
        at_once = max(1, _LARGEST_BATCH // (samples * max(self.inputs, self.outputs)))
        parts = []
        for start in range(0, count, at_once):
            chunk = vectors[:, start : start + at_once]
            x = np.repeat(self._x, chunk.shape[1], axis=0)
            u = chunk.reshape(-1, *shape).astype(self._x.dtype)
            parts.append(self._run(step, x, u).reshape(samples, chunk.shape[1], -1))
        return np.concatenate(parts, axis=1).astype("float64")

    def _run(self, step: Any, *arrays: np.ndarray) -> np.ndarray:
        tensors = [keras.ops.convert_to_tensor(array) for array in arrays]
        states = [variable.value for variable in self._states]
        return to_numpy(step(states, *tensors))

    def _outputs(self, states: list[Any], x: Any) -> Any:
        states = [keras.ops.stop_gradient(state) for state in states]
        pairs = zip(self._states, states, strict=True)
        # The outer scope catches and drops updates, of seed states for instance.
        with keras.StatelessScope(), VariableOverrides(pairs), from_zero_states(self._model):
            found = keras.tree.flatten(self._model(x, training=False))
        if len(found) != 1:
            raise NotPrunableError(
                f"Jacobians are computed for models with one output. Received: {len(found)} outputs"
            )
        return keras.ops.cast(found[0], x.dtype)

    def _transpose_times(self, states: list[Any], x: Any, v: Any) -> Any:
        """`J^T v`: the gradient of `<f(x), v>` with respect to `x`."""
        # And to `v`: torch keeps the graph only for values that another gradient hangs on.
        _, (product, _) = value_and_gradients(
            lambda pair: keras.ops.sum(self._outputs(states, pair[0]) * pair[1]), [x, v]
        )
        return product

    def _jacobian_times(self, states: list[Any], x: Any, u: Any) -> Any:
        # `J^T v` is linear in v, so the gradient of <J^T v, u> is J u. This needs no forward-mode
        # rules, which some functions lack (live blocks).
        v = keras.ops.zeros((x.shape[0], *self._output_shape), dtype=x.dtype)
        with second_derivatives():
            _, (product,) = value_and_gradients(
                lambda values: keras.ops.sum(self._transpose_times(states, x, values[0]) * u), [v]
            )
        return product


def bidiagonalize(
    forward: Product, backward: Product, start: np.ndarray, rows: int, steps: int
) -> tuple[np.ndarray, np.ndarray]:
    """Golub-Kahan bidiagonalization of several operators `A` at once: `A V = U B`.

    With `B = P diag(s) Q^T`, `sum_i Q[0, i]^2 f(s_i)` estimates `v^T f(sqrt(A^T A)) v` for
    `v = start / |start|`, exactly for polynomials in `s^2` of degree `2 steps - 1`. `forward` and
    `backward` are `A` and `A^T` of vectors `(operators, columns)` and `(operators, rows)`. Returns
    the Ritz values `s`, descending, and their weights `Q[0]^2`.
    """
    operators, columns = start.shape
    v = np.zeros((operators, steps, columns))
    u = np.zeros((operators, steps, rows))
    matrix = np.zeros((operators, steps, steps))
    scale = np.zeros(operators)
    direction = start / np.linalg.norm(start, axis=1, keepdims=True)
    for k in range(steps):
        v[:, k] = direction
        left = _orthogonalized(forward(direction), u[:, :k])
        left, matrix[:, k, k] = _normalized(left, scale)
        scale = np.maximum(scale, matrix[:, k, k])
        u[:, k] = left
        if k + 1 < steps:
            right = _orthogonalized(backward(left), v[:, : k + 1])
            direction, matrix[:, k, k + 1] = _normalized(right, scale)
            scale = np.maximum(scale, matrix[:, k, k + 1])
    _, values, q = np.linalg.svd(matrix)
    return values, q[:, :, 0] ** 2


def _orthogonalized(vectors: np.ndarray, basis: np.ndarray) -> np.ndarray:
    """The vectors without their components along an orthonormal basis."""
    for _ in range(2):  # twice is enough
        along = np.einsum("skn,sn->sk", basis, vectors)
        vectors = vectors - np.einsum("skn,sk->sn", basis, along)
    return vectors


def _normalized(vectors: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Unit vectors and norms; zeros once the space is exhausted and only rounding is left."""
    norms = np.linalg.norm(vectors, axis=1)
    norms = np.where(norms > _EXHAUSTED * scale, norms, 0.0)
    safe = np.where(norms > 0, norms, 1.0)
    return np.where(norms[:, None] > 0, vectors / safe[:, None], 0.0), norms
