"""`TargetDensity`: learnt thresholds that end at the density asked for."""

import warnings
from typing import Any

import numpy as np

from keras_sparse_ortho._checks import check_density
from keras_sparse_ortho._optimizer_slots import zero_slots
from keras_sparse_ortho.callbacks._step_callback import StepCallback
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.models import prunable_weights
from keras_sparse_ortho.orthogonal import live_count
from keras_sparse_ortho.parametrizations import LearntThreshold
from keras_sparse_ortho.schedules import Cubic, Schedule

# Of a run's steps, where no schedule is given.
_RAMP = 0.7


class TargetDensity(StepCallback):
    """Steers the thresholds of all weights that have learnt ones to a global density.

    All layers share an offset `o`: their thresholds are `t_l = g(s_l + o)`. Layers go on learning
    their relative thresholds `s_l`; the offset says how many entries are live in all. An entry `w`
    of layer `l` dies at its critical offset `g^-1(|w|) - s_l`, so the offset between the k-th and
    the next largest critical offset of the whole model leaves exactly `k` entries live. At every
    step of the schedule that offset is set for `k = round(d(t) * size)`: no search over weight
    decay and `s_init` is needed.

    At the end of the schedule the live entries are fixed (`freeze`): `w` becomes `w_e`, the
    thresholds become 0 and dead entries get no gradient any more, so that the count stays exact
    while the rest of the run trains the weights that are left. What is due at the last step of a
    run is done when it ends.

    Args:
        final_density: Global live fraction in the end, in (0, 1].
        schedule: A schedule; its final density is replaced. Default: `Cubic` over the first 70% of
            the run, from the density that there is to `final_density`.
        frequency: Steps between two settings of the offset, where no schedule is given.
        freeze: Whether to fix the live entries at the end of the schedule. If not, the offset goes
            on being set every `frequency` steps, and once more when the run ends.

    Raises:
        DensityError: A density outside (0, 1].
        NotPrunableError: When training begins, if no weight has a `SoftThreshold` or
            another learnt threshold; if some are on ranks and others are not.
        ValueError: When training begins without a schedule on data whose length is not known.

    Limits: between two settings the count drifts by what the weights move. Channels die as a whole,
    so with `ChannelSoftThreshold` the count is exact to within one of them; with
    `LowRankSoftThreshold` ranks are counted instead of entries. All layers are ranked together, so
    that one of small magnitudes can lose all its entries; a warning names it. With
    `g="sigmoid"` entries of magnitude 1 and more cannot die; a warning says so if they are too
    many. Ranking is done on the host, with NumPy, and costs about as much as copying and sorting
    the weights every `frequency` steps.

    Example:

    >>> import keras, numpy as np
    >>> import keras_sparse_ortho as kso
    >>> dense = keras.Sequential([keras.Input((64,)), keras.layers.Dense(34)])
    >>> model = kso.parametrize(dense, kso.parametrizations.SoftThreshold())
    >>> model.compile("sgd", "mse")
    >>> history = model.fit(np.ones((64, 64)), np.ones((64, 34)), verbose=0, batch_size=4,
    ...                     callbacks=[TargetDensity(0.125, frequency=4)])
    >>> kso.prunable_weights(model)[0].live  # 0.125 * 64 * 34
    272

    References:

    - Kusupati et al., "Soft Threshold Weight Reparameterization for Learnable Sparsity" (ICML
      2020), arXiv 2002.03231, for the thresholds
    - Zhu and Gupta, "To prune, or not to prune" (2017), arXiv 1710.01878, for the schedule
    """

    def __init__(
        self,
        final_density: float,
        schedule: Schedule | None = None,
        *,
        frequency: int = 100,
        freeze: bool = True,
    ) -> None:
        super().__init__()
        self.final_density = check_density(final_density, "final_density")
        self.schedule = None if schedule is None else schedule.with_final(self.final_density)
        self.frequency = frequency
        self.freeze = freeze
        self._plan: Schedule | None = None
        self._thresholds: list[LearntThreshold] = []
        self._all_frozen = False
        self._warned = False
        self._warned_of: set[str] = set()

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Refuses a model without soft thresholds; lays out the schedule."""
        found = [w.parametrization for w in prunable_weights(self.model, flops=False)]
        self._thresholds = [p for p in found if isinstance(p, LearntThreshold)]
        if not self._thresholds:
            raise NotPrunableError(
                "TargetDensity needs weights with SoftThreshold, see keras_sparse_ortho.parametrize"
                f". Received: model={self.model.name!r} without any"
            )
        counted = sorted({t.counted for t in self._thresholds})
        if len(counted) > 1:
            raise NotPrunableError(
                "TargetDensity steers one density: that of entries, or that of ranks. "
                f"Received: a model with thresholds on both, {counted}"
            )
        self._all_frozen = all(t.frozen for t in self._thresholds)
        self._plan = self.schedule or self._default_schedule()

    def on_step(self, step: int, executed: int) -> None:
        """Sets the offset if the schedule says so, and fixes the live entries at its end."""
        plan = self._plan
        assert plan is not None
        ended = plan.end_step is not None and step >= plan.end_step
        held = ended and not self.freeze and step % plan.frequency < executed
        # Where it should have been frozen, at whatever step a run was resumed.
        late = ended and self.freeze and not self._all_frozen
        if plan.due(step, executed) or held or late:
            self.sync()
            self._set(plan.density(step), fix=ended and self.freeze)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Does what is due at the last step."""
        step = self.synced_step()
        plan = self._plan
        assert plan is not None
        ended = plan.end_step is not None and step >= plan.end_step
        if ended or plan.due(step, self._watched.steps_per_execution):
            self._set(plan.density(step), fix=ended and self.freeze)

    def _set(self, density: float, *, fix: bool) -> None:
        weights = [t for t in self._thresholds if not t.frozen]
        if not weights:
            return
        critical = [t.critical_offsets() for t in weights]
        everything = np.concatenate([np.ravel(c) for c in critical])
        count = live_count(density, everything.size)
        self._warn_of_unreachable(int(np.count_nonzero(np.isposinf(everything))), count)
        offset = _offset_for(everything, count)
        masks = _exact_masks(critical, count) if fix else [c > offset for c in critical]
        pairs = list(zip(weights, masks, strict=True))
        self._warn_of_collapse([t.weight.path for t, mask in pairs if not mask.any()])
        for t, mask in pairs:
            t.offset.assign(offset)
            if fix:
                live = t.freeze(mask)
                zero_slots(self._watched.optimizer, t.steered, ~live)
        self._all_frozen = self._all_frozen or fix

    def _warn_of_unreachable(self, unreachable: int, count: int) -> None:
        if unreachable > count and not self._warned:
            self._warned = True
            warnings.warn(
                "More weights than may stay live are larger than any threshold of this `g`; take "
                f"g='exp' or 'softplus'. Received: {unreachable} such weights, {count} to keep",
                stacklevel=2,
            )

    def _warn_of_collapse(self, paths: list[str]) -> None:
        fresh = [path for path in paths if path not in self._warned_of]
        self._warned_of.update(fresh)
        if fresh:
            warnings.warn(
                "TargetDensity leaves weights without a live entry: their magnitudes are small "
                "against those of the others. `exclude` them from `parametrize`, or ask for a "
                f"higher density. Received: {fresh}",
                stacklevel=2,
            )

    def _default_schedule(self) -> Schedule:
        epochs, steps = self.params.get("epochs"), self.params.get("steps")
        if not epochs or not steps:
            raise ValueError(
                "TargetDensity needs a `schedule` where the number of steps is not known before "
                f"training. Received: epochs={epochs!r}, steps={steps!r}"
            )
        end = max(int(_RAMP * epochs * steps), 1)
        return Cubic(self.final_density, 0, end, frequency=min(self.frequency, end))


def _offset_for(critical: np.ndarray, count: int) -> float:
    """An offset that `count` critical offsets are above, as nearly as there is one."""
    if count == critical.size:
        return float(_finite(critical).min(initial=0.0)) - 1.0
    ranked = np.partition(critical, critical.size - count - 1)
    below = float(ranked[critical.size - count - 1])
    above = float(ranked[critical.size - count :].min())
    if not np.isfinite(below) and below > 0:  # no offset kills so many
        return float(_finite(critical).max(initial=0.0)) + 1.0
    if not np.isfinite(below):  # all below are exactly 0
        return (above if np.isfinite(above) else 0.0) - 1.0
    return (below + above) / 2 if np.isfinite(above) else below + 1.0


def _finite(values: np.ndarray) -> np.ndarray:
    return values[np.isfinite(values)]


def _exact_masks(critical: list[np.ndarray], count: int) -> list[np.ndarray]:
    """The `count` entries of largest critical offset; ties to the first weight and index."""
    everything = np.concatenate([np.ravel(c) for c in critical])
    # By rank, as -inf and inf are among them.
    order = np.argsort(-everything, kind="stable")
    live = np.zeros(everything.size, dtype=bool)
    live[order[:count]] = True
    parts = np.split(live, np.cumsum([c.size for c in critical])[:-1])
    return [part.reshape(c.shape) for part, c in zip(parts, critical, strict=True)]
