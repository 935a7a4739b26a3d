"""`report`: a table of what came out, layer by layer."""

from typing import Any

from keras_sparse_ortho.analysis._orthogonality import orthogonality_error
from keras_sparse_ortho.analysis._sparsity_report import Row, SparsityReport
from keras_sparse_ortho.initializers import is_as_drawn
from keras_sparse_ortho.kernels import PrunableWeight
from keras_sparse_ortho.models import prunable_weights
from keras_sparse_ortho.parametrizations import FixedMask


def report(model: Any, *, orthogonality: bool | str = True) -> SparsityReport:
    """Parameters, density, FLOPs and orthogonality of every kernel of a model, with totals.

    For kernel `k`: `density = live / size`; FLOPs are multiply-adds for one sample, counted once
    each as in the tables of the STR and RigL papers, `size * positions` for the dense kernel and
    `live * positions` for the sparse one.

    Args:
        model: A built Keras model; wrapped, stripped or dense.
        orthogonality: Whether to compute the orthogonality errors (`orthogonality_error` of the
            effective kernel, at its own scale), which takes a matrix product a kernel. They are
            given for kernels that were drawn to be orthogonal and have not been trained since;
            with `"all"` for every kernel.

    Returns:
        A `SparsityReport`: prints as a table, and has `to_dict()` and `to_csv(path)`.

    Raises:
        NotPrunableError: A model that is not built.

    Limits: only kernels are listed; biases, normalization, activations and pooling are neither in
    the parameters nor in the FLOPs. `model.count_params()` has all parameters.

    Example:

    >>> import keras
    >>> import keras_sparse_ortho as kso
    >>> model = keras.Sequential([keras.Input((100,)), keras.layers.Dense(50, name="hidden")])
    >>> summary = kso.report(kso.sparsify(model, 0.1, seed=0))
    >>> summary.rows[0].live, summary.rows[0].sparse_flops, summary.density
    (500, 500, 0.1)
    """
    rows = []
    for weight in prunable_weights(model, flops=True):
        rows.append(
            Row(
                path=weight.path,
                shape=weight.shape,
                size=weight.size,
                live=weight.live,
                flops=weight.flops,
                sparse_flops=weight.sparse_flops,
                orthogonality_error=_orthogonality(weight, orthogonality),
            )
        )
    return SparsityReport(tuple(rows), name=str(getattr(model, "name", "")))


def _orthogonality(weight: PrunableWeight, which: bool | str) -> float | None:
    """The error of a kernel that was drawn to be orthogonal and is as it was drawn, or of any."""
    if not which or (which != "all" and not _is_as_drawn(weight)):
        return None
    return orthogonality_error(weight.value(), weight.layout)


def _is_as_drawn(weight: PrunableWeight) -> bool:
    mask = weight.parametrization
    if isinstance(mask, FixedMask):
        drawn_by, fresh = mask.drawn_by, mask.is_as_drawn
    else:
        drawn_by, fresh = weight.initializer, lambda: is_as_drawn(weight)
        # To compare, it is drawn once more, which for an approximate one may take minutes.
        if mask is not None or getattr(drawn_by, "isometry", None) != "exact":
            return False
    return drawn_by is not None and drawn_by.isometry is not None and fresh()
