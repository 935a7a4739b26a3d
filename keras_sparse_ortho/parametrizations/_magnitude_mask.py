"""`MagnitudeMask`: gradual magnitude pruning."""

import keras
import numpy as np

from keras_sparse_ortho.parametrizations._scheduled_mask import ScheduledMask


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class MagnitudeMask(ScheduledMask):
    """Effective weight `w_e = w` on the `round(d(t) * size)` largest magnitudes, 0 elsewhere.

    The density `d(t)` follows a schedule. At its steps the callback
    `keras_sparse_ortho.callbacks.UpdateMasks` ranks `|w|` (ties to the lower flat index), stores
    the mask, and sets dropped raw weights and their optimizer slots to zero. Between the renewals
    masked entries get no gradient, so an entry that was dropped returns only if the density rises.

    Args:
        schedule: `Cubic` (gradual magnitude pruning), `Linear`, `Constant`, `OneShot`; a density;
            or a TFMOT `PruningSchedule`.
        frequency: Steps between renewals where `schedule` is a density. Default: a hundredth of
            the run, but 100 at most.

    Raises:
        NotPrunableError: At a renewal, if the weight is not finite; when stripped, if no mask was
            ever set because `UpdateMasks` was not among the callbacks.

    Limits: the network is dense at first and trained at its full cost; for training that is sparse
    from the first step see `FixedMask`.

    Example:

    >>> import keras, numpy as np
    >>> import keras_sparse_ortho as kso
    >>> dense = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    >>> schedule = kso.schedules.Cubic(0.25, begin_step=0, end_step=4, frequency=2)
    >>> model = kso.parametrize(dense, MagnitudeMask(schedule))
    >>> model.compile("sgd", "mse")
    >>> history = model.fit(np.ones((16, 8)), np.ones((16, 4)), batch_size=2, verbose=0,
    ...                     callbacks=[kso.callbacks.UpdateMasks()])
    >>> kso.prunable_weights(model)[0].live
    8

    Reference:

    - Zhu and Gupta, "To prune, or not to prune" (2017), arXiv 1710.01878
    """

    def unfinished(self) -> str | None:
        """A mask that was never set."""
        if self.last_renewed >= 0:
            return None
        begin = self.schedule.begin_step or 1
        steps = "1 step" if begin == 1 else f"{begin} steps"
        least = f"{begin:.0%} of the run" if isinstance(begin, float) else steps
        return (
            "its mask was never set: train with keras_sparse_ortho.callbacks.UpdateMasks(), for "
            f"at least {least}"
        )

    def _initial_mask(self) -> np.ndarray:
        self.weight.finite_raw_value()
        return np.ones(self.weight.shape, dtype=bool)
