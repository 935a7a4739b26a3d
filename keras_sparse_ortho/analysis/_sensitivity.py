"""`sensitivity`: what each layer of a trained model loses at several densities, and rounded."""

from collections.abc import Sequence
from typing import Any

from keras_sparse_ortho._checks import check_density, other_keywords
from keras_sparse_ortho.calibration import (
    Sensitivity,
    calibration_batches,
    measurable,
    measured_errors,
)
from keras_sparse_ortho.kernels import Selection
from keras_sparse_ortho.models import check_built
from keras_sparse_ortho.pruning import shows_progress, weights_to_prune


@other_keywords
def sensitivity(
    model: Any,
    data: Any,
    *,
    densities: Sequence[float] = (0.5, 0.3, 0.2, 0.1, 0.05),
    include: Selection = None,
    exclude: Selection = None,
) -> Sensitivity:
    """Measures what each layer of a trained model loses when its kernel is pruned or rounded.

    For the kernel `W` and the inputs `X` of its layer in the model as given, the error is
    `|X (V - W)|^2 / |X W|^2` on every fourth row of data. `V` is the kernel of `prune(score="obs")`
    on the other rows, or `W` in int8 or int4. The gain of a layer is how much of its error is in
    the outputs of the model, with this kernel alone in int4. `budget="error"` measures the same.

    Args:
        model: A built Keras model with dense kernels.
        data: A few hundred rows of inputs, as for `prune`.
        densities: list of float in (0, 1]. Live fractions.
        include: Which kernels, as for `sparsify`.
        exclude: Which kernels not.

    Returns:
        A `calibration.Sensitivity`, which prints as a table, has `plot()` (after
        `pip install keras-sparse-ortho[plot]`) and `predicted(budget)`, the error of the whole
        model, and is a `budget` that needs no second measurement.

    Raises:
        DensityError: A density outside (0, 1].
        NotPrunableError: A model without kernels that can be measured.

    Warns:
        UserWarning: Kernels that cannot be measured; fewer than 16 different rows.

    Limits: takes as long as `prune(score="obs")`, with a bar in a terminal. `prune` lets layers
    make up for those before them, which no prediction here knows.

    Examples:
        >>> import keras, numpy as np
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, name="a")])
        >>> x = np.random.default_rng(0).normal(size=(64, 8))
        >>> errors = sensitivity(model, x, densities=(0.5, 0.25)).errors["a/kernel"]
        >>> list(errors), errors[0.25] > errors[0.5] > errors["int8"]
        ([0.5, 0.25, 'int8', 'int4'], True)
    """
    shares = [check_density(share) for share in densities]
    check_built(model)
    batches = calibration_batches(model, data)
    weights = measurable(
        model, weights_to_prune(model, include, exclude), batches
    )
    return measured_errors(model, weights, shares, batches, shows_progress())
