"""`report`: a table of what came out, layer by layer."""

from typing import Any

import numpy as np

from keras_sparse_ortho._data import first_batches
from keras_sparse_ortho.analysis._orthogonality import orthogonality_error
from keras_sparse_ortho.analysis._sparsity_report import Row, SparsityReport
from keras_sparse_ortho.initializers import SparseInitializer, is_as_drawn
from keras_sparse_ortho.kernels import PrunableWeight
from keras_sparse_ortho.models import prunable_weights, warn_unless_at_density
from keras_sparse_ortho.orthogonal import dead_outputs


def report(model: Any, *, orthogonality: bool | str = True, sample: Any = None) -> SparsityReport:
    """Parameters, density, FLOPs, orthogonality and dead outputs of every kernel of a model.

    For kernel `k`: `density = live / size`; FLOPs are multiply-adds for one sample, counted once
    each as in the tables of the STR and RigL papers, `size * positions` for the dense kernel and
    `live * positions` for the sparse one. `dead_outputs` counts the outputs whose effective kernel
    is all zero, which after ReLU never wake; `gain` and `taps` are those of the initializer that
    drew the kernel, as `sparsify` has chosen them. These have columns in the table where they tell
    something: any dead output, any gain but 1, any taps but the center.

    Everything dense is listed: a kernel without a mask, and a matrix whose layer is not registered,
    has a row that says why (`Row.state`), and beside the density of the sparse kernels
    (`sparse_density`) stand those of all kernels (`density`) and of all matrices of the model
    (`whole_density`).

    Args:
        model: A built Keras model; wrapped, stripped or dense.
        orthogonality: Whether to compute the orthogonality errors (`orthogonality_error` of the
            effective kernel, at its own scale), which takes a matrix product a kernel. They are
            given for kernels that were drawn to be orthogonal and have not been trained since;
            with `"all"` for every kernel.
        sample: Data as `fit` takes it, whose inputs fix the sizes (pixels, timesteps) that the
            model leaves open; without it the FLOPs of such a model are not known.

    Returns:
        A `SparsityReport`: prints as a table, and has `to_dict()` and `to_csv(path)`.

    Raises:
        NotPrunableError: A model that is not built.

    Warns:
        DensityWarning: A model that training has left at another density than the one asked for.

    Limits: only matrices are listed; biases, normalization, activations and pooling are neither in
    the parameters nor in the FLOPs. `model.count_params()` has all parameters.

    Example:

    >>> import keras
    >>> import keras_sparse_ortho as kso
    >>> model = keras.Sequential([keras.Input((100,)), keras.layers.Dense(50, name="hidden")])
    >>> summary = kso.report(kso.sparsify(model, 0.1, seed=0))
    >>> summary.rows[0].live, summary.rows[0].sparse_flops, summary.density
    (500, 500, 0.1)
    """
    warn_unless_at_density(model)
    if sample is not None:
        sample = first_batches(sample, batch_size=1, shuffle=False)[0][0]
    weights = prunable_weights(model, flops=True, sample=sample, unregistered=True)
    known: list[Row] = []
    others: list[Row] = []
    for weight in weights:
        wrapped = weight.storage is not None
        listed = known if weight.registered or wrapped else others
        listed.append(_row(weight, orthogonality, wrapped))
    return SparsityReport(tuple(known), str(getattr(model, "name", "")), tuple(others))


def _row(weight: PrunableWeight, orthogonality: bool | str, wrapped: bool) -> Row:
    live = weight.live
    state = "no mask" if weight.registered else "not registered"
    return Row(
        path=weight.path,
        shape=weight.shape,
        size=weight.size,
        live=live,
        flops=weight.flops,
        sparse_flops=weight.sparse_flops,
        orthogonality_error=_orthogonality(weight, orthogonality),
        dead_outputs=_dead_outputs(weight),
        gain=getattr(_drawn_by(weight), "gain", None),
        taps=getattr(_drawn_by(weight), "taps", None),
        state="sparse" if wrapped or live < weight.size else state,
    )


def _orthogonality(weight: PrunableWeight, which: bool | str) -> float | None:
    """The error of a kernel that was drawn to be orthogonal and is as it was drawn, or of any."""
    if not which or (which != "all" and not _is_as_drawn(weight)):
        return None
    return orthogonality_error(weight.value(), weight.layout)


def _drawn_by(weight: PrunableWeight) -> SparseInitializer | None:
    """The sparse initializer that drew a kernel and its mask, `None` for others."""
    own = weight.initializer if weight.storage is None else weight.storage.drawn_by
    return own if isinstance(own, SparseInitializer) else None


def _is_as_drawn(weight: PrunableWeight) -> bool:
    drawn_by = _drawn_by(weight)
    if drawn_by is None or drawn_by.isometry is None:
        return False
    if weight.storage is not None:
        return weight.storage.is_as_drawn()
    # To compare, it is drawn once more, which for an approximate one may take minutes.
    return drawn_by.isometry == "exact" and is_as_drawn(weight)


def _dead_outputs(weight: PrunableWeight) -> int:
    if len(weight.shape) < 2 and weight.layout is None:  # of a layer that names its own weights
        return int(np.count_nonzero(weight.value() == 0))
    return dead_outputs(weight.value(), weight.layout)
