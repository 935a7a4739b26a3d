"""`LowRankSoftThreshold`: learnt thresholds between two thin factors (low-rank STR)."""

from typing import NamedTuple

import keras
import numpy as np

from keras_sparse_ortho._checks import check_integer, other_keywords
from keras_sparse_ortho._types import AddWeight, Tensor
from keras_sparse_ortho._values import assign, to_numpy
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.kernels import KernelLayout, PrunableWeight
from keras_sparse_ortho.parametrizations._learnt_threshold import (
    LearntThreshold,
    add_weight_decay,
)


class _Factors(NamedTuple):
    """The thin factors of a matrix `left diag(values) right^T`."""

    left: np.ndarray
    values: np.ndarray
    right: np.ndarray


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class LowRankSoftThreshold(LearntThreshold):
    """Effective weight `W_e = U diag(v_e) V^T` with `v_e = sign(v) relu(|v| - t)` and `t = g(s)`.

    Low-rank STR for dense and recurrent matrices: `U` (m x r), `v` (r) and `V` (n x r) are trained
    instead of the weight `W` (m x n), and the threshold prunes entries of `v`, one rank each. They
    start from the singular value decomposition `W = A diag(sigma) B^T`, as

        U = A sqrt(2 sigma_1),  v = sigma / (2 sigma_1),  V = B sqrt(2 sigma_1)

    so `v` is in [0, 0.5] for weights of any scale, which a sigmoid reaches. `strip` replaces a
    `Dense` by two thin layers, and puts a thin one before an LSTM, GRU or SimpleRNN, if these are
    smaller; other layers get the product, and gain nothing: exclude them. Call `settle` to
    decompose weights that are set after the wrapper was built.

    Args:
        rank: int. Number `r` of values, at most the smaller side of the matrix. Default: all.
        g, s_init: As for `SoftThreshold`.
        weight_decay: float. Strength `lambda` of the L2 that is added to the loss, `lambda / 2 *
            (|U|^2 + |v|^2 + |V|^2 + s^2)`.

    Raises NotPrunableError, when built, for a weight that is not finite, or not a matrix from
    inputs to outputs (as kernels of convolutions).

    Limits: every training step computes the product, in `r m n` multiply-adds. No entry is zero:
    `mask_value` is full until no rank is left. `callbacks.TargetDensity` steers the fraction of
    ranks of all weights together; flat spectra, as of orthogonal recurrent kernels, lose ranks
    last. Regularizers and constraints of the layer's own kernel have no effect.

    Examples:
        >>> import keras, numpy as np, keras_sparse_ortho as kso
        >>> dense = keras.layers.Dense(2, use_bias=False)
        >>> layer = kso.PrunableLayer(dense, LowRankSoftThreshold(s_init=-np.log(3)))
        >>> layer.build((None, 2))
        >>> _ = dense.kernel.assign([[3.0, 0.0], [0.0, 1.0]])
        >>> layer.parametrizations["kernel"].settle()  # v is [1/2, 1/6], and t = g(s) = 1/4
        >>> np.abs(keras.ops.convert_to_numpy(layer(np.eye(2)))).round(3).tolist()
        [[1.5, 0.0], [0.0, 0.0]]

    Reference: Kusupati et al. (ICML 2020), arXiv 2002.03231, section 4.3, for structured STR.
    """

    counted = "ranks"
    settings = ("rank", *LearntThreshold.settings)
    left: keras.Variable = None
    values: keras.Variable = None
    right: keras.Variable = None

    @other_keywords
    def __init__(
        self,
        rank: int | None = None,
        g: str = "sigmoid",
        s_init: float = -8.0,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(g, s_init, weight_decay)
        if rank is not None:
            rank = check_integer("rank", rank)
        self.rank = rank

    def build(
        self,
        weight: PrunableWeight,
        add_weight: AddWeight,
    ) -> None:
        """Creates threshold and mask of the singular values."""
        self._rows = _rows(weight)
        self._build_threshold(weight, add_weight)
        factors = self._decomposed()
        self._build_mask(add_weight, factors.values.shape)
        for name, value in factors._asdict().items():
            variable = add_weight(
                name=name,
                shape=value.shape,
                initializer="zeros",
                trainable=True,
            )
            assign(variable, value)
            variable.trainable = weight.variable.trainable
            if self.weight_decay:
                add_weight_decay(variable, self.weight_decay)
            setattr(self, name, variable)
        self.steered = self.values
        self.keep_untrained()

    def settle(self) -> None:
        for name, value in self._decomposed()._asdict().items():
            assign(getattr(self, name), value)

    def keep_untrained(self) -> None:
        self.weight.variable.trainable = (
            False  # the factors are trained in its place
        )

    @property
    def trained_variable(self) -> keras.Variable:
        return self.values

    def release(self) -> None:
        self.weight.variable.trainable = self.values.trainable

    def effective(self, value: Tensor) -> Tensor:
        ops = keras.ops
        values = self._shrunk(ops.convert_to_tensor(self.values.value))
        scaled_left = self.left.value * values
        product = ops.matmul(scaled_left, ops.transpose(self.right.value))
        matrix = ops.reshape(product, self.weight.shape)
        return ops.cast(matrix, value.dtype)

    def mask_value(self) -> np.ndarray:
        return np.full(self.weight.shape, self.live_rank > 0)

    @property
    def live_rank(self) -> int:
        return int(np.count_nonzero(self._numpy_values()))

    def factors(self) -> tuple[np.ndarray, np.ndarray]:
        """Factors (m, k), (k, n) of the live ranks, of one scale, whose product is the weight."""
        values = self._numpy_values()
        live = np.flatnonzero(values)
        root = np.sqrt(np.abs(values[live]))
        signed_root = root * np.sign(values[live])
        live_left = to_numpy(self.left)[:, live] * signed_root
        right = to_numpy(self.right)[:, live] * root
        return live_left, right.T

    def counts(self) -> tuple[int, int]:
        return self.live_rank, int(self.values.shape[0])

    def scales(self) -> np.ndarray:
        values = to_numpy(self.values)
        factors = [to_numpy(self.left), values, to_numpy(self.right)]
        wrong = sum(
            np.count_nonzero(~np.isfinite(factor)) for factor in factors
        )
        if wrong:
            raise NotPrunableError(
                f"The factors of the weight {self.weight.path!r} are not finite. "
                f"Received: {wrong} infinite or NaN entries"
            )
        return np.abs(values) * to_numpy(self.frozen_mask)

    def _numpy_values(self) -> np.ndarray:
        return to_numpy(self._shrunk(keras.ops.convert_to_tensor(self.values)))

    def _decomposed(self) -> _Factors:
        """The factors of the largest singular values, of a scale where these are at most 1/2."""
        matrix = self.weight.finite_raw_value().reshape(self._rows, -1)
        left_vectors, values, right_vectors = np.linalg.svd(
            matrix.astype(np.float64), full_matrices=False
        )
        scale = 1.0
        if values[0] > 0:
            scale = 2 * values[0]
        root = np.sqrt(scale)
        ranks = slice(None, self.rank)
        thin_left = left_vectors[:, ranks] * root
        thin_right = right_vectors[ranks].T * root
        scaled_values = values[ranks] / scale
        return _Factors(
            thin_left.astype(np.float32),
            scaled_values.astype(np.float32),
            thin_right.astype(np.float32),
        )


def _rows(weight: PrunableWeight) -> int:
    """Number of inputs `m` of a matrix with inputs first."""
    layout = weight.layout or KernelLayout.convolution()
    rank = len(weight.shape)
    input_axes = [axis % rank for axis in layout.inputs]
    output_axes = [axis % rank for axis in layout.outputs]
    split = len(input_axes)
    if sorted(input_axes) + sorted(output_axes) != list(range(rank)):
        raise NotPrunableError(
            f"The weight {weight.path!r} must be a matrix from inputs to outputs to have a rank; "
            "LowRankSoftThreshold is for dense and recurrent layers. "
            f"Received: shape={weight.shape}"
        )
    return int(np.prod(weight.shape[:split]))
